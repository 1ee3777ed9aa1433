"""What real engines are asked: a workload's requests with prompts of text, and models by name. Loads no torch."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from adasim.errors import InputError
from adasim.files import is_file
from adasim.real.texts import read_prompts
from adasim.types import Request
from adasim.workload import Workload

DRAFTERS = Path(str(files("adasim") / "real" / "drafters"))
Encode = Callable[[str], list[int]]


def check_domains(workload: Workload, prompts: str | None, rows: Sequence[int] | None) -> None:
    """Refuse a workload with a domain that has no prompts.

    Raises:
        InputError: which.
    """
    found = read_prompts(prompts, rows)
    missing = [d for d in workload.domain_names if d not in found]
    if missing:
        raise InputError(f"workload.domains: no prompts for {', '.join(missing)}; there are {', '.join(found)}")


def with_texts(
    workload: Workload, seed: int, prompts: str | None, rows: Sequence[int] | None, encode: Encode
) -> tuple[list[Request], list[list[int]]]:
    """Requests with real prompts, each domain's in an order of its own, and their tokens."""
    texts = read_prompts(prompts, rows)
    for domain, lines in texts.items():
        random.Random(f"{seed}/{domain}").shuffle(lines)
    taken: dict[str, int] = defaultdict(int)
    requests, tokens = [], []
    for r in workload.generate(seed):
        domain = workload.domain_names[r.domain]
        ids = encode(texts[domain][taken[domain] % len(texts[domain])])
        taken[domain] += 1
        requests.append(replace(r, prompt_len=len(ids), hash_ids=()))
        tokens.append(ids)
    return requests, tokens


def with_random_tokens(workload: Workload, seed: int, vocab: int) -> tuple[list[Request], list[list[int]]]:
    """Requests with prompts of their own lengths that mean nothing."""
    requests = workload.generate(seed)
    return requests, [random.Random(f"{seed}/{r.id}").choices(range(vocab), k=r.prompt_len) for r in requests]


def chat_encoder(target: str) -> tuple[Encode, frozenset[int]]:
    """Prompt to tokens as a chat's first turn, and the tokens that end an answer."""
    from adasim.real.weights import load_tokenizer

    tokenizer = load_tokenizer(target)

    def encode(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    return encode, frozenset({int(tokenizer.eos_token_id)})


def check_context(requests: Sequence[Request], target: str, limit: int) -> None:
    """Refuse a request that the target cannot hold.

    Raises:
        InputError: the first such request.
    """
    for r in requests:
        if r.prompt_len + r.output_len > limit:
            raise InputError(
                f"workload: request {r.id} has {r.prompt_len} prompt and {r.output_len} output tokens; "
                f"{target} takes {limit} in all"
            )


def draft_folder(drafter: str) -> Path:
    """The drafter's folder, or the packaged drafter of that name.

    Raises:
        InputError: neither.
    """
    for folder in (Path(drafter).expanduser(), DRAFTERS / drafter):
        if is_file(folder / "config.json"):
            return folder
    shipped = ", ".join(sorted(p.parent.name for p in DRAFTERS.glob("*/config.json"))) or "none"
    raise InputError(f"backend.drafter: {drafter} holds no config.json; packaged drafters: {shipped}")


def draft_limits(config: dict[str, Any]) -> tuple[int, set[str]]:
    """Longest draft of a checkpoint, and what it provides to policies, by its config.json."""
    provides = {"survival", "margin"}
    provides |= {"accept_len"} if config["architectures"] == ["AdaFlashDraftModel"] else set()
    return int(config["block_size"]) - 1, provides


def config_sha256(folder: Path) -> str | None:
    """Of a model folder's config.json; None = it cannot be read."""
    try:
        return sha256((folder / "config.json").read_bytes()).hexdigest()
    except OSError:
        return None
