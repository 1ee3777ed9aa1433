"""ADAFLASH as SGLang sees it: a member of its DFLASH family whose verification may be ragged.

Every process of every server with this package imports this file: what is heavy waits until ADAFLASH is chosen.
"""

import os
from pathlib import Path
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from adasim.errors import InputError
from adasim.real.sglang_plugin import contract

NAME = "ADAFLASH"
DEFAULT_RUNNING = 48  # SGLang's own for speculative decoding
# whose verification takes blocks of different lengths; flashinfer for targets with MLA only, see the worker
RAGGED_BACKENDS = ("fa3", "fa4", "flashinfer", "trtllm_mha", "trtllm_mla")


class AdaFlashAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Joins the DFLASH branches of scheduler, memory and runners; supplies what the custom base class lacks."""

    def is_dflash(self) -> bool:
        """Shares DFLASH's branches: its worker is a DFLASH worker."""
        return True

    def is_dflash_family(self) -> bool:
        """Aux hidden states of the target are captured, draft KV is sized like DFLASH's."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The draft pass is a block, like a verification."""
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        """Draft KV is written to the slots that the target's prefill wrote."""
        return True

    def supports_mixed_chunk(self) -> bool:
        """Chunks of prompts may share a step with rounds."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """Grammars advance inside verification."""
        return True

    def supports_ragged_verify(self) -> bool:
        """Requests are verified at lengths of their own; SGLANG_RAGGED_VERIFY_MODE=compact captures graphs for that."""
        return True

    def carries_draft_hidden_states(self) -> bool:
        """No hidden states travel between disaggregated servers."""
        return False

    def need_topk(self) -> bool:
        """A chain, no tree."""
        return False

    def get_platform_worker_cls(self) -> None:
        """No platform replaces the worker."""

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """What overlapped scheduling relays from round to round."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what follows from the draft checkpoint.

        Raises:
            InputError: arguments, settings or checkpoint do not fit.
        """
        from adasim.policies.driver import PolicyDriver
        from adasim.real.checkpoint import read_config, read_shape
        from adasim.real.sglang_plugin.settings import read_settings
        from adasim.types import EngineCaps

        problems = _unsupported(server_args)
        if problems:
            raise InputError(*(f"{NAME}: {p}" for p in problems))
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_RUNNING
        folder = Path(server_args.speculative_draft_model_path)
        config = read_config(folder)
        block, asked = read_shape(config, folder).block, server_args.speculative_num_draft_tokens
        if asked not in (None, block):
            raise InputError(f"{NAME}: --speculative-num-draft-tokens {asked}; the checkpoint drafts blocks of {block}")
        server_args.speculative_num_draft_tokens = block
        settings = read_settings(str(folder))
        provides = {"survival", "margin"} | ({"cost"} if settings.cost is not None else set())
        provides |= {"accept_len"} if config.get("architectures") == ["AdaFlashDraftModel"] else set()
        caps = EngineCaps(block - 1, server_args.max_running_requests, provides=frozenset(provides), cost=settings.cost)
        PolicyDriver(settings.policy, caps)  # refuses here, not when the model is loaded


def register() -> None:
    """Make ``--speculative-algorithm ADAFLASH`` known, once a process."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    @SpeculativeAlgorithm.register(  # type: ignore[untyped-decorator]
        NAME, supports_overlap=True, validate_server_args=_validate, spec_class=AdaFlashAlgorithm
    )
    def worker(server_args: Any) -> type:
        contract.check()
        from sglang.srt.models.registry import ModelRegistry

        from adasim.real.sglang_plugin.draft_model import AdaFlashDraftModel
        from adasim.real.sglang_plugin.hooks import open_scheduler
        from adasim.real.sglang_plugin.worker import AdaFlashWorker

        ModelRegistry.models[AdaFlashDraftModel.__name__] = AdaFlashDraftModel  # checkpoints name it
        open_scheduler()
        return AdaFlashWorker


def _validate(server_args: Any) -> None:
    """SGLang calls this before anything is loaded, in the launching process: a wrong version ends the start there."""
    contract.check()


def _unsupported(args: Any) -> list[str]:
    """Arguments that this worker would not honour."""
    draft = args.speculative_draft_model_path
    simulated = os.environ.get("SGLANG_SIMULATE_ACC_LEN", "")
    checks = [
        (draft is None, "--speculative-draft-model-path is missing"),
        (
            draft is not None and not (Path(draft) / "config.json").is_file(),
            f"--speculative-draft-model-path: {draft} is no local folder with a config.json",
        ),
        (args.pp_size != 1, f"--pp-size {args.pp_size}; allowed: 1"),
        (args.disaggregation_mode != "null", f"--disaggregation-mode {args.disaggregation_mode}; allowed: null"),
        (args.enable_dp_attention, "--enable-dp-attention: idle ranks are not handled; allowed: without"),
        (args.speculative_draft_window_size is not None, "--speculative-draft-window-size is not supported"),
        (
            args.speculative_dflash_block_size is not None,
            "--speculative-dflash-block-size has no effect: the checkpoint says its block",
        ),
        (
            args.speculative_use_block_verification,
            "--speculative-use-block-verification has no meaning for greedy drafts",
        ),
        (args.speculative_adaptive, "--speculative-adaptive belongs to EAGLE; here the policy decides"),
        (simulated not in ("", "0", "-1"), f"SGLANG_SIMULATE_ACC_LEN={simulated!r} is not supported: unset it"),
        *([] if args.device == "cpu" else _unsupported_on_gpu(args)),
    ]
    return [text for wrong, text in checks if wrong]


def _unsupported_on_gpu(args: Any) -> list[tuple[bool, str]]:
    """What would verify whole blocks where ragged ones are meant. SGLang has chosen its backends by now."""
    prefill = args.prefill_attention_backend or args.attention_backend
    decode = args.decode_attention_backend or args.attention_backend
    target = decode if args.speculative_attention_mode == "decode" else prefill
    draft = args.speculative_draft_attention_backend or prefill
    mode, allowed = os.environ.get("SGLANG_RAGGED_VERIFY_MODE", "static"), ", ".join(RAGGED_BACKENDS)
    return [
        (mode != "compact", f"SGLANG_RAGGED_VERIFY_MODE={mode}; allowed on a GPU: compact (set it in the environment)"),
        (
            target not in RAGGED_BACKENDS,
            f"--attention-backend: {target} verifies the target's blocks, at one length only; allowed: {allowed}",
        ),
        (
            draft not in RAGGED_BACKENDS,
            f"--speculative-draft-attention-backend {draft}: drafts blocks of one length only; allowed: {allowed}",
        ),
    ]
