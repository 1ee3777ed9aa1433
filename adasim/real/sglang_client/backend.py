"""The SGLang backend: a scenario's requests answered by a server of SGLang with adasim's plugin. Loads no SGLang."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from adasim import __version__
from adasim.calibration.alarm import Alarm
from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.identity import EngineIdentity, fingerprint, processor
from adasim.policies.base import Policy
from adasim.policies.scheduler import AnyScheduler, Fcfs
from adasim.real.asked import check_domains, draft_folder, draft_limits
from adasim.real.engine_backend import EngineBackend
from adasim.real.opd import Opd
from adasim.real.sampling import Forced, Sampling
from adasim.real.sglang_client.api import Api, Gone, Refused
from adasim.real.sglang_client.asking import asked, model_config
from adasim.real.sglang_client.launching import OURS, gpu_name, launch_of, ranks_of
from adasim.real.sglang_client.process import kept, leased, python, versions
from adasim.real.sglang_client.resolved import resolved
from adasim.real.sglang_client.serving import info_of, serve
from adasim.real.turns import Turns, to_the_end
from adasim.records import Records
from adasim.serving.kv import KvMemory
from adasim.types import EngineCaps, Request
from adasim.workload import Workload


class SglangBackend(EngineBackend):
    """SGLang with adasim's plugin, on this machine or at a URL.

    Requests take prompts of their domains (``prompt_len`` is ignored) and ask for ``output_len`` tokens. Without ``url``
    a server is started for the first run and kept for all that differ in policy, load and cost only. ``off`` is played by
    the same server: nothing is drafted and no drafter follows, but each token goes through the path of verification.

    Attributes:
        url: of a server that runs; it is refused where it differs from what the other fields say. null = start one.
        target: ``smollm2-135m`` or a Hugging Face folder that the server can read by the same path, or holds a copy of.
        drafter: folder of a DFlash checkpoint, or a packaged one's name.
        threads: CPU threads of a server without a GPU.
        max_running_requests: one limit for every policy.
        lag_steps: 1 = overlapped scheduling, SGLang's default on GPUs: policies learn of a round one round late.
        max_prefill_tokens: prompt tokens of one prefill step; longer prompts are refused (SGLang would cut them up).
        captured_tokens: sizes of the graphs that verification was captured with, as the server says them; [] = none.
        kv: blocks and tokens of each; a server's memory has a size, so ``blocks`` must be given.
        scheduler: SGLang admits by itself: fcfs.
        prompts: folder of ``<domain>*.jsonl``; null = the packaged ones.
        rows: lines of those files to use, first and last + 1.
        ignore_eos: answer until ``output_len`` whatever the model says.
        forced: accept by decree, for profiling; marked in every record. Its ``prompts: random`` use ``prompt_len``.
        cost: what policies may know of time, measured on this machine; null = policies that ask are refused.
        profile: a calibrated profile, whose cost they know instead.
        opd: train the drafter while it serves, by a trainer on this machine; null = it stays as it is. A server at a
            url must run here, too, and take orders for experiments; in the end it serves the drafter it began with.
        alarm: watches tau; null = nobody does.
        arguments: more of SGLang's own, by name, for a server that is started: ``{attention_backend: fa3}``.
    """

    kind: Literal["sglang"] = "sglang"
    url: str | None = None
    target: str = "smollm2-135m"
    drafter: str
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cuda"
    threads: int = Field(default=1, ge=1)
    max_running_requests: int = Field(default=32, ge=1)
    lag_steps: Literal[0, 1] = 0
    max_prefill_tokens: int = Field(default=2048, ge=1)
    captured_tokens: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    kv: KvMemory
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
    arguments: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = self._believe(self.cost, self.profile) + self._untaught(self.opd, self.forced)
        if self.kv.blocks is None:
            problems.append("kv.blocks: is missing; a server's memory has a size (its max_total_num_tokens / page_size)")
        if self.kv.prefix_cache:
            problems.append("kv.prefix_cache: real prompts share no 512-token blocks; allowed: false")
        if self.scheduler.kind != "fcfs":
            problems.append(f"scheduler: SGLang admits by itself, {self.scheduler.kind} cannot run there; allowed: fcfs")
        for name in sorted(OURS.keys() & self.arguments.keys()):
            use = f"backend.{OURS[name]} decides it" if OURS[name] else "it is decided already"
            problems.append(f"arguments.{name}: {use}")
        if self.url is not None and self.arguments:
            problems.append("arguments: are for a server that is started, not for one at a url")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def trains(self) -> bool:
        """Whether the drafter learns while it serves."""
        return self.opd is not None and self.opd.enabled

    def identity(self) -> EngineIdentity:
        """Where this engine's numbers come from; what the server resolved its arguments to, once it runs.

        Raises:
            InputError: target or drafter are not there, or no server at the URL.
        """
        info = self._running()
        if info is not None:
            own = info["adasim"]
            tp = int(info.get("tp_size") or 1)
            hardware, of = own["hardware"] if tp == 1 else f"{tp} x {own['hardware']}", str(info["version"])
            interpreter = str(own["python"])
        else:
            of, interpreter = versions(python())
            hardware = processor() if self.device == "cpu" else gpu_name(ranks_of(self))
        return EngineIdentity(
            engine=self.kind,
            engine_version=of,
            adasim=__version__,
            hardware=hardware,
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            target=self.target,
            target_sha256=fingerprint(self.target_folder()),
            drafter=self.drafter,
            drafter_sha256=fingerprint(self.draft_folder()),
            python=interpreter,
            resolved=None if info is None else resolved(info),
        )

    def caps(self) -> EngineCaps:
        """The engine's limits and what it provides."""
        longest, provides = draft_limits(model_config(self.draft_folder()))
        return EngineCaps(
            max_draft_len=longest,
            max_running_requests=self.max_running_requests,
            captured_tokens=tuple(self.captured_tokens),
            lag_steps=self.lag_steps,
            provides=frozenset(provides | ({"cost"} if self._believed is not None else set())),
            cost=self._believed,
        )

    def check_workload(self, workload: Workload, seed: int) -> None:
        """Refuse what cannot run.

        Raises:
            InputError: a domain has no prompts, or a trainer is asked for and torch is not installed.
        """
        check_domains(workload, self.prompts, self.rows)
        if self.trains and find_spec("torch") is None:
            raise InputError("backend.opd: its trainer runs in this environment; needs `pip install adasim[real]`")

    def served_requests(self, workload: Workload, seed: int) -> list[Request]:
        """A workload's requests with the lengths of the prompts that they will get."""
        return asked(self, workload, seed)[0]

    def forced_fields(self, accepted: int, *, prefill: bool) -> dict[str, Any]:
        """Fields for runs that measure costs: acceptance by decree, prompts of the workload's own lengths.

        Args:
            accepted: drafts that every block accepts, as far as it is verified.
            prefill: ignored: SGLang has no other way to a context than to compute it.
        """
        return {"forced": Forced(lengths=[accepted], prompts="random").model_dump(), "ignore_eos": True, "opd": None}

    def run(self, workload: Workload, policy: Policy, seed: int) -> Records:
        """Serve one run in real time.

        Raises:
            InputError: the server is not the one that the scenario means, or refuses the run.
            CutShort: it went away, with the records of what it had done.
        """
        if self.url is not None:
            return to_the_end(serve(self, Api(self.url), workload, policy, seed))
        with leased(launch_of(self)) as server:
            return to_the_end(serve(self, server.api, workload, policy, seed))

    def takes_turns(self, workload: Workload) -> bool:
        """Closed loops can wait between steps, each on a server of its own: without a GPU there is room for several."""
        return self.url is None and self.device == "cpu" and workload.clients is not None and not self.trains

    def turns(self, workload: Workload, policy: Policy, seed: int) -> Turns[Records]:
        """See :meth:`EngineBackend.turns`."""
        with leased(launch_of(self)) as server:
            yield 0.0  # others start theirs first: a server that is held for minutes would take itself for hung
            return (yield from serve(self, server.api, workload, policy, seed, server.hold))

    def target_folder(self) -> Path:
        """The target's folder."""
        from adasim.real.weights import RANDOM, model_dir

        if self.target in RANDOM:
            raise InputError(f"backend.target: {self.target} has no folder that SGLang could read")
        return model_dir(self.target)

    def draft_folder(self) -> Path:
        """The drafter's folder."""
        return draft_folder(self.drafter)

    def _running(self) -> dict[str, Any] | None:
        """What the server says, where one runs."""
        if self.url is not None:
            return info_of(Api(self.url))
        server = kept(launch_of(self))
        try:
            return None if server is None else server.api.info()
        except (Gone, Refused):
            return None
