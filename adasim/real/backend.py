"""The real backend: a scenario's requests answered by real models, on this machine. Importing it loads no torch."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from adasim import __version__
from adasim.calibration.alarm import Alarm
from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.identity import EngineIdentity, fingerprint, processor
from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.policies.scheduler import AnyScheduler, Fcfs
from adasim.real.asked import (
    chat_encoder,
    check_context,
    check_domains,
    draft_folder,
    draft_limits,
    with_random_tokens,
    with_texts,
)
from adasim.real.engine_backend import EngineBackend
from adasim.real.opd import Opd
from adasim.real.sampling import Forced, Sampling
from adasim.real.turns import Stopwatch, Turns, to_the_end
from adasim.records import Records
from adasim.serving.admission import Admission
from adasim.serving.drift import tell_drift
from adasim.serving.kv import KvMemory
from adasim.serving.monitor import Finished, Monitor
from adasim.serving.recorder import Recorder
from adasim.types import EngineCaps, Request
from adasim.workload import Workload


class TorchBackend(EngineBackend):
    """A real engine in this process.

    A request takes a prompt of its domain (its ``prompt_len`` is ignored) and asks for ``output_len`` tokens;
    the model may end earlier. Real time: the same arguments give the same text, not the same seconds.

    Attributes:
        target: ``smollm2-135m``, a Hugging Face folder, or ``random-*`` (see ``weights.RANDOM``).
        drafter: folder of a DFlash checkpoint, or a packaged one's name; null = plain decoding.
        threads: CPU threads; one is best beside other busy processes.
        max_running_requests: one limit for every policy.
        prompts: folder of ``<domain>*.jsonl``; null = the packaged ones.
        rows: lines of those files to use, first and last + 1.
        ignore_eos: answer until ``output_len`` whatever the model says.
        forced: accept by decree, for profiling; marked in every record. Its ``prompts: random`` use ``prompt_len``.
        cost: what policies may know of time, measured on this machine; null = policies that ask are refused.
        profile: a calibrated profile, whose cost they know instead.
        opd: train the drafter while it serves, in a process of its own; null = it stays as it is.
        alarm: watches tau; null = nobody does.
    """

    kind: Literal["torch"] = "torch"
    target: str = "smollm2-135m"
    drafter: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(default=1, ge=1)
    max_running_requests: int = Field(default=32, ge=1)
    lag_steps: int = Field(default=0, ge=0)
    max_prefill_tokens: int = Field(default=2048, ge=1)
    kv: KvMemory = KvMemory()
    scheduler: AnyScheduler = Fcfs()
    sampling: Sampling = Sampling()
    prompts: str | None = None
    rows: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    ignore_eos: bool = False
    forced: Forced | None = None
    cost: AnyCost | None = None
    profile: str | None = None
    opd: Opd | None = None
    alarm: Alarm | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = self._believe(self.cost, self.profile)
        if self.opd is not None and self.drafter is None:
            problems.append("opd needs a drafter")
        problems += self._untaught(self.opd, self.forced)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def identity(self) -> EngineIdentity:
        """Where this engine's numbers come from.

        Raises:
            InputError: target or drafter are not there.
        """
        import torch

        from adasim.real.weights import RANDOM, model_dir

        shape = RANDOM.get(self.target)
        drafts = None if self.drafter is None else self._draft_folder()
        return EngineIdentity(
            engine=self.kind,
            engine_version=torch.__version__,
            adasim=__version__,
            hardware=torch.cuda.get_device_name() if self.device == "cuda" else processor(),
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            target=self.target,
            target_sha256=sha256(repr(shape).encode()).hexdigest() if shape else fingerprint(model_dir(self.target)),
            drafter=self.drafter,
            drafter_sha256=fingerprint(drafts) if drafts else None,
            python=platform.python_version(),
        )

    def caps(self) -> EngineCaps:
        """The engine's limits and what it provides."""
        provides, longest = set[str](), 1
        if self.drafter is not None:
            longest, provides = draft_limits(self._draft_config())
        return EngineCaps(
            max_draft_len=longest,
            max_running_requests=self.max_running_requests,
            lag_steps=self.lag_steps,
            provides=frozenset(provides | ({"cost"} if self._believed is not None else set())),
            cost=self._believed,
        )

    def check_workload(self, workload: Workload, seed: int) -> None:
        """Refuse what cannot run.

        Raises:
            InputError: a domain has no prompts, or torch is not installed.
        """
        check_domains(workload, self.prompts, self.rows)
        self.scheduler.check(self.caps())
        if find_spec("torch") is None:
            raise InputError("backend: kind torch needs `pip install adasim[real]`")

    def run(self, workload: Workload, policy: Policy, seed: int) -> Records:
        """Serve one run in real time."""
        return self.serve(workload, policy, seed)[0]

    def serve(self, workload: Workload, policy: Policy, seed: int) -> tuple[Records, list[list[int]]]:
        """Serve one run; also returns the output tokens of every request."""
        return to_the_end(self._serving(workload, policy, seed))

    def takes_turns(self, workload: Workload) -> bool:
        """Closed loops can wait between steps; arrivals, and a trainer in a process of its own, do not."""
        return workload.clients is not None and not (self.opd is not None and self.opd.enabled)

    def turns(self, workload: Workload, policy: Policy, seed: int) -> Turns[Records]:
        """See :meth:`EngineBackend.turns`."""
        return (yield from self._serving(workload, policy, seed))[0]

    def _serving(self, workload: Workload, policy: Policy, seed: int) -> Turns[tuple[Records, list[list[int]]]]:
        """Serve one run; stops after every step, and its clock with it."""
        import torch

        from adasim.real.engine import Engine
        from adasim.real.loaded import keep_target

        torch.set_num_threads(self.threads)
        target = keep_target(self.target, getattr(torch, self.dtype), torch.device(self.device))
        loads = policy.loads_drafter or (self.opd is not None and self.opd.enabled)
        start, drafter, head = self.load_drafter(target) if loads else (None, None, None)
        encode, eos = self._tokenizer(target.arch.vocab)
        if self.forced is not None and self.forced.prompts == "random":
            requests, prompts = with_random_tokens(workload, seed, target.arch.vocab)
        else:
            requests, prompts = with_texts(workload, seed, self.prompts, self.rows, encode)
        self._check_lengths(requests, target.arch.max_context)
        caps, domains = self.caps(), workload.domain_names
        admission = Admission(requests, np.zeros(len(requests), dtype=np.int64), self.scheduler, self.kv, caps)
        recorder = Recorder(domains, caps.block, rounds=True)
        with self._distiller(start, target, domains, f"{policy.label}-{seed}") as distiller:
            clock = Stopwatch()
            engine = Engine(
                target,
                drafter,
                head,
                PolicyDriver(policy, caps),
                admission,
                recorder,
                prompts,
                eos=frozenset() if self.ignore_eos else eos,
                max_len=max(r.prompt_len + r.output_len for r in requests) + caps.block,
                sampling=self.sampling,
                seed=seed,
                max_prefill_tokens=self.max_prefill_tokens,
                forced=self.forced,
                collector=distiller.collector if distiller else None,
                full_verify_share=self.opd.full_verify_share if self.opd else 0.0,
                clock=clock,
            )
            lives, events = admission.lives, recorder.events
            monitor = Monitor(self.alarm, domains, lambda: recorder.draft_version, events) if self.alarm else None
            watch = (lambda i: monitor.on_finish(Finished.of(lives, i))) if monitor else _nothing
            between = (lambda: distiller.poll(engine)) if distiller else _nothing
            for share in _play(engine, workload, requests, watch, between):
                clock.stop()
                yield share
                torch.set_num_threads(self.threads)
                clock.go_on()
        if distiller is not None or monitor is not None:
            tell_drift(recorder.events, workload, requests, admission.lives)
        records = recorder.records(admission.lives)
        if self.forced is not None:
            records.notes.append(f"acceptance was forced to {self.forced.lengths}: the text means nothing")
        records.notes += distiller.notes() if distiller else []
        return records, [engine.tokens[i][r.prompt_len :] for i, r in enumerate(requests)]

    @contextmanager
    def _distiller(self, start: Any, target: Any, domains: Sequence[str], run: str) -> Iterator[Any]:
        """The serving side of distillation with its trainer; None when nothing is trained."""
        if self.opd is None or not self.opd.enabled:
            yield None
            return
        from adasim.real.distiller import Distiller

        with (
            self.opd.run_folder(run) as root,
            Distiller(self.opd, start, target, self.target, self.sampling, root, domains) as distiller,
        ):
            yield distiller

    def served_requests(self, workload: Workload, seed: int) -> list[Request]:
        """A workload's requests with the lengths of the prompts that they will get."""
        from adasim.real.weights import RANDOM

        vocab = RANDOM[self.target].vocab if self.target in RANDOM else 0  # only random targets need to know
        return with_texts(workload, seed, self.prompts, self.rows, self._tokenizer(vocab)[0])[0]

    def forced_fields(self, accepted: int, *, prefill: bool) -> dict[str, Any]:
        """Fields for runs that measure costs: acceptance by decree, prompts of the workload's own lengths.

        Args:
            accepted: drafts that every block accepts, as far as it is verified.
            prefill: compute prompts; false: their context is made up.
        """
        forced = Forced(lengths=[accepted], prompts="random", prefill=prefill)
        return {"forced": forced.model_dump(), "ignore_eos": True, "scheduler": {"kind": "fcfs"}, "opd": None}

    def _check_lengths(self, requests: list[Request], limit: int) -> None:
        check_context(requests, self.target, limit)
        self.kv.check(requests, self.caps().block)

    def _tokenizer(self, vocab: int) -> tuple[Any, frozenset[int]]:
        """Prompt to tokens, and the tokens that end an answer; random targets read bytes."""
        from adasim.real.weights import RANDOM

        if self.target in RANDOM:
            return lambda text: [b % vocab for b in text.encode()], frozenset()
        return chat_encoder(self.target)

    def _draft_config(self) -> dict[str, Any]:
        assert self.drafter is not None
        config: dict[str, Any] = json.loads((self._draft_folder() / "config.json").read_text())
        return config

    def _draft_folder(self) -> Path:
        """The drafter's folder, or the packaged drafter of that name."""
        assert self.drafter is not None
        return draft_folder(self.drafter)

    def load_drafter(self, target: Any) -> tuple[Any, Any, Any]:
        """The checkpoint, and from it drafter and length head, ready to run beside a loaded target; None without.

        Raises:
            InputError: made for a target of another shape.
        """
        if self.drafter is None:
            return None, None, None
        from adasim.real.loaded import keep_checkpoint, keep_ready

        found = keep_checkpoint(self._draft_folder(), target.dtype)
        if (found.shape.arch.hidden, found.shape.target_layers) != (target.arch.hidden, target.arch.layers):
            raise InputError(
                f"backend.drafter: made for a target of {found.shape.target_layers} layers of width "
                f"{found.shape.arch.hidden}; {self.target} has {target.arch.layers} layers "
                f"of width {target.arch.hidden}"
            )
        return found, *keep_ready(self._draft_folder(), target)


def _nothing(*_: object) -> None:
    """Without a trainer, or an alarm."""


def _play(
    engine: Any,
    workload: Workload,
    requests: list[Request],
    watch: Callable[[int], None],
    between: Callable[[], None],
) -> Iterator[float]:
    """Send requests as the workload says and run the engine until the last one it waits for has finished.

    Yields the share of all output tokens that are there, after every step.

    Args:
        watch: called with every request that finished.
        between: called after every step.
    """
    admission, sent, finished = engine.admission, 0, 0
    lives = admission.lives
    clients, drain = workload.clients, getattr(workload, "drain", True)

    def send(count: int) -> None:
        nonlocal sent
        for _ in range(min(count, len(requests) - sent)):
            now = engine.clock()
            admission.submit(sent, now)
            engine.recorder.last_arrival_s = now
            sent += 1

    send(clients or 0)
    while finished < len(requests) and (drain or sent < len(requests)):
        if clients is None:
            send(sum(r.arrival_s <= engine.clock() for r in requests[sent:]))
        if not len(admission.batch) and not admission.queue:
            time.sleep(max(requests[sent].arrival_s - engine.clock(), 0.0))
            continue
        left = engine.step()
        for index in left:
            watch(index)
        done = len(left)
        between()
        finished += done
        if clients is not None:
            send(done)
        yield float(lives.done.sum() / lives.want.sum())
