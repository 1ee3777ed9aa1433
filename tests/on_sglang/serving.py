"""SGLang with SmolLM2 and the shipped drafter, and the torch engine beside it, both in fp32 on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.scheduler import Fcfs
from adasim.real.asked import DRAFTERS
from adasim.real.checkpoint import load_checkpoint
from adasim.real.draft import ready
from adasim.real.engine import Engine
from adasim.real.sampling import Sampling
from adasim.real.sglang_plugin.rounds import Round
from adasim.real.weights import load_target, model_dir
from adasim.serving.admission import Admission
from adasim.serving.kv import KvMemory
from adasim.serving.recorder import Recorder
from adasim.types import EngineCaps, Request, StepOutcome

TARGET, DRAFTER = "smollm2-135m", DRAFTERS / "smollm2-135m"
RUNNING = 16
ARGUMENTS: dict[str, Any] = {
    "model_path": str(model_dir(TARGET)),
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "max_total_tokens": 8192,
    "context_length": 2048,
    "max_running_requests": RUNNING,
    "disable_cuda_graph": True,
    "random_seed": 1,
    "log_level": "warning",
}


class Served(NamedTuple):
    """What a run gave, request by request."""

    tokens: list[list[int]]
    meta: list[dict[str, Any]]
    rounds: list[Round]

    def of(self, request: int) -> list[tuple[int, int, int]]:
        """Draft length, verify length and accepted drafts of every round of a request."""
        numbers = sorted({i for r in self.rounds for i in r.requests})
        rows = [(r, r.requests.index(numbers[request])) for r in self.rounds if numbers[request] in r.requests]
        return [(r.draft_lens[i], r.verify_lens[i], r.accepted[i]) for r, i in rows]


class Server:
    """The real SGLang under ADAFLASH."""

    def __init__(self, **arguments: Any) -> None:
        import sglang

        os.environ["ADASIM_POLICY"] = json.dumps({"policy": {"kind": "fixed", "verify_len": 16}})
        drafter = {
            "speculative_algorithm": "ADAFLASH",
            "speculative_draft_model_path": str(DRAFTER),
            "speculative_draft_attention_backend": "torch_native",
        }
        self.engine = sglang.Engine(**(ARGUMENTS | drafter | arguments))

    def use(self, policy: Policy) -> None:
        """Decide by another policy from now on."""
        self.engine.collective_rpc("adasim_policy", settings=json.dumps({"policy": given(policy)}))

    def rounds(self) -> list[Round]:
        """Every round that is kept."""
        log = self.engine.get_server_info()["internal_states"][0]["adasim"]
        assert log["fields"] == list(Round._fields)
        return [Round(*row) for row in log["rounds"]]

    def serve(self, policy: Policy, prompts: Sequence[list[int]], tokens: int, **sampling: Any) -> Served:
        """Answer prompts with so many tokens each, all at once."""
        self.use(policy)
        known = self.rounds()
        seen = known[-1].step if known else -1
        shape = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        out = self.engine.generate(input_ids=list(prompts), sampling_params=shape)
        rounds = [r for r in self.rounds() if r.step > seen]
        return Served([o["output_ids"] for o in out], [o["meta_info"] for o in out], rounds)


def given(policy: Policy) -> dict[str, Any]:
    """A policy as JSON holds it."""
    return {"kind": policy.kind, **policy.model_dump(mode="json", exclude_unset=True)}


class _Watched(PolicyDriver):
    """Remembers every outcome."""

    seen: list[StepOutcome]

    def observe(self, outcome: StepOutcome) -> None:
        self.seen.append(outcome)
        super().observe(outcome)


def torch_rounds(policy: Policy, prompt: list[int], tokens: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Output and rounds of the torch engine for one request: draft length, verify length, accepted drafts."""
    torch.set_num_threads(1)
    target = load_target(TARGET, torch.float32)
    found = load_checkpoint(DRAFTER, torch.float32)
    drafter, head = ready(found, target)
    caps = EngineCaps(found.shape.block - 1, 1, provides=frozenset({"survival", "accept_len", "margin"}))
    driver = _Watched(policy, caps)
    driver.seen = []
    admission = Admission([Request(0, 0, len(prompt), tokens)], np.zeros(1, np.int64), Fcfs(), KvMemory(), caps)
    engine = Engine(
        target, drafter, head, driver, admission, Recorder(("default",), caps.block), [prompt], eos=frozenset(),
        max_len=len(prompt) + tokens + caps.block, sampling=Sampling(),
    )  # fmt: skip
    admission.submit(0, 0.0)
    while not engine.step():
        pass
    rounds = [(int(o.draft_lens[0]), int(o.verify_lens[0]), int(o.accepted[0])) for o in driver.seen]
    return engine.tokens[0][len(prompt) :], rounds


def run(script: str, *arguments: str, timeout_s: float = 360.0, environment: Mapping[str, str] | None = None) -> Any:
    """The JSON that a script beside this file prints last."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    env = os.environ | (environment or {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def copy_of(folder: Path, out: Path) -> Path:
    """A checkpoint's files in another, writable folder."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix in {".json", ".npy", ".safetensors"}:
            (out / file.name).write_bytes(file.read_bytes())
    return out
