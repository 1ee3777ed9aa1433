"""The command that starts SGLang with ADAFLASH, with what a scenario's engine says resolved into flags."""

from dataclasses import dataclass
from shlex import quote
from typing import Any

from adasim.deploy.memory import Needs
from adasim.errors import InputError
from adasim.exports.source import Source
from adasim.real.sglang_plugin.settings import FILE, VARIABLE

BACKEND = "fa3"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started.

    Attributes:
        environment: variables, by name.
        flags: of ``sglang.launch_server``, each with its value; "" = none.
        says: what of the engine has no flag, or was assumed.
    """

    environment: dict[str, str]
    flags: dict[str, str]
    says: list[str]

    @property
    def script(self) -> str:
        """A shell script that lies beside the policy."""
        lines = ["#!/bin/sh", "# adasim deploy: simulated, not yet run on this engine"]
        lines.append('here=$(cd "$(dirname "$0")" && pwd) || exit 1')
        lines += [f'export {k}="{v}"' for k, v in self.environment.items()]
        flags = [f"  {k} {quote(v) if v else ''}".rstrip() for k, v in self.flags.items()]
        return "\n".join([*lines, "exec python -m sglang.launch_server \\", " \\\n".join(flags)]) + "\n"


def launch(source: Source, target: str, drafter: str, memory: Needs | None) -> Launch:
    """Flags for the engine that was simulated.

    Raises:
        InputError: what the plugin refuses.
    """
    engine = source.backend
    split = engine.parallel
    problems = ["backend.parallel.dp: ADAFLASH refuses attention ranks (DP attention)"] * bool(split and split.dp > 1)
    problems += ["backend.disaggregation: ADAFLASH refuses disaggregated servers"] * bool(engine.disaggregation)
    if engine.scheduler.kind != "fcfs":
        problems.append(f"backend.scheduler: {engine.scheduler.kind} cannot run in SGLang; allowed: fcfs")
    if problems:
        raise InputError(*problems)
    flags: dict[str, Any] = {
        "--model-path": target,
        "--attention-backend": BACKEND,
        "--speculative-algorithm": "ADAFLASH",
        "--speculative-draft-model-path": drafter,
        "--speculative-num-draft-tokens": source.max_draft_len + 1,
        "--max-running-requests": source.max_batch,
        "--cuda-graph-max-bs-decode": source.max_batch,
    }
    if split and split.tp > 1:
        flags["--tp-size"] = split.tp
    if engine.chunked_prefill is not None:
        flags["--chunked-prefill-size"] = engine.chunked_prefill
    if engine.max_prefill_tokens is not None:
        flags["--max-prefill-tokens"] = engine.max_prefill_tokens
    if engine.kv.blocks is not None:
        flags["--max-total-tokens"] = engine.kv.blocks * engine.kv.block_tokens
    if not engine.kv.prefix_cache:
        flags["--disable-radix-cache"] = ""
    if engine.memory_fraction is not None:
        flags["--mem-fraction-static"] = engine.memory_fraction
    elif memory is not None:
        flags["--mem-fraction-static"] = memory.fraction
    says = ["prefix caching is off, as it was simulated; drop --disable-radix-cache if prompts share prefixes"]
    says = says * (not engine.kv.prefix_cache)
    if engine.chunked_prefill is None:
        says.append("prefills were simulated as steps of their own; SGLang mixes chunks in with --enable-mixed-chunk")
    environment = {"SGLANG_RAGGED_VERIFY_MODE": "compact", VARIABLE: f"$here/{FILE}"}
    return Launch(environment, {k: str(v) for k, v in flags.items()}, says)
