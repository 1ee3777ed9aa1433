"""What a server is asked for a workload: prompts, and SGLang's sampling parameters; and what cannot be asked."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adasim.errors import InputError
from adasim.real.asked import chat_encoder, check_context, with_random_tokens, with_texts
from adasim.real.sglang_plugin.settings import DOMAIN
from adasim.types import Request
from adasim.workload import Workload

if TYPE_CHECKING:
    from adasim.real.sglang_client.backend import SglangBackend


def asked(backend: "SglangBackend", workload: Workload, seed: int) -> tuple[list[Request], list[list[int]]]:
    """Requests with the lengths of their prompts, and those as tokens."""
    if backend.forced is not None and backend.forced.prompts == "random":
        return with_random_tokens(workload, seed, int(model_config(backend.target_folder())["vocab_size"]))
    return with_texts(workload, seed, backend.prompts, backend.rows, chat_encoder(backend.target)[0])


def check_lengths(backend: "SglangBackend", requests: Sequence[Request]) -> None:
    """Refuse requests that cannot be served as they are.

    Raises:
        InputError: the first.
    """
    check_context(requests, backend.target, int(model_config(backend.target_folder())["max_position_embeddings"]))
    backend.kv.check(requests, backend.caps().block)
    for r in requests:
        if r.prompt_len > backend.max_prefill_tokens:
            raise InputError(
                f"workload: request {r.id} has {r.prompt_len} prompt tokens; SGLang would compute them in chunks of "
                f"backend.max_prefill_tokens {backend.max_prefill_tokens}, which is not simulated; raise it"
            )


def shapes(backend: "SglangBackend", workload: Workload, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """SGLang's sampling parameters of each request; where a trainer listens it is told the domain."""
    ends = {"ignore_eos": True} if backend.ignore_eos else {"stop_token_ids": sorted(chat_encoder(backend.target)[1])}
    shared = {"temperature": backend.sampling.temperature, "top_p": backend.sampling.top_p} | ends
    each = [shared | {"max_new_tokens": r.output_len} for r in requests]
    if not backend.trains:
        return each
    names = workload.domain_names
    return [s | {"custom_params": {DOMAIN: names[r.domain]}} for s, r in zip(each, requests, strict=True)]


@lru_cache(maxsize=16)
def model_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
