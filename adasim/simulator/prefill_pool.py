"""Prefill engines apart from the engine that decodes."""

from collections import deque
from collections.abc import Callable
from typing import Self

import simpy
from pydantic import Field, model_validator

from adasim.calibration.cost import CostModel
from adasim.calibration.parallel import Parallel
from adasim.calibration.roofline import AnyCost
from adasim.records import PrefillRecord, StepRecord
from adasim.serving.lives import FINISHED, WAITING, Lives
from adasim.serving.recorder import Recorder
from adasim.simulator.engine import Process
from adasim.types import Component, IntArray


class Disaggregation(Component):
    """Prefill-decode disaggregation: prompts are computed by engines of their own, whose KV cache is then sent.

    One queue, first come, first served; each free engine takes whole prompts, its share of those that wait, up to
    ``max_prefill_tokens`` or one prompt. It gives the first token, which the user sees when the KV cache has arrived:
    TTFT = queue + prefill + transfer. An engine sends one KV cache after the other while it goes on prefilling. Arrived
    requests wait for KV memory of the decoding engine, which never prefills: requests that it evicts are kept in host
    memory (as SGLang's decoding engines do) and return after the time of another transfer. Prefill engines have memory
    for all they hold, which is not modelled.

    Attributes:
        prefill_engines: engines that prefill; 0 = none, the decoding engine prefills itself (to sweep from).
        transfer_gb_s: bandwidth out of one prefill engine, all its GPUs together, GB/s.
        transfer_ms: time of a transfer beside moving bytes.
        kv_bytes_per_token: sent for each prompt token; null = the roofline says.
        parallel: GPUs of one prefill engine; null = those of its ``cost`` where it has its own, else as many as the
            decoding engine's, which then must have no attention ranks.
        cost: prices the prefills; null = the decoding engine's cost.
    """

    prefill_engines: int = Field(default=1, ge=0)
    transfer_gb_s: float = Field(default=50.0, gt=0)
    transfer_ms: float = Field(default=1.0, ge=0)
    kv_bytes_per_token: float | None = Field(default=None, gt=0)
    parallel: Parallel | None = None
    cost: AnyCost | None = None

    @model_validator(mode="after")
    def _one_rank(self) -> Self:
        if self.parallel is not None and self.parallel.dp > 1:
            raise ValueError("parallel.dp: prefill engines have one attention rank; use more engines instead")
        if self.parallel is not None and self.parallel.routing != Parallel().routing:
            raise ValueError("parallel.routing has no effect: a free prefill engine takes from one queue")
        return self


class PrefillPool:
    """Plays the prefill engines.

    Args:
        env: the SimPy clock.
        config: how many engines, and their link.
        cost: seconds of a prefill.
        bytes_per_token: KV cache to send.
        max_tokens: prompt tokens of one prefill (one prompt always fits).
        lives: all requests.
        recorder: told when requests arrive, and what came last.
    """

    def __init__(
        self,
        env: simpy.Environment,
        config: Disaggregation,
        cost: CostModel,
        bytes_per_token: float,
        max_tokens: int,
        lives: Lives,
        recorder: Recorder,
    ) -> None:
        self.env, self.cost, self.max_tokens = env, cost, max_tokens
        self.lives, self.recorder = lives, recorder
        self._latency_s, self._token_s = config.transfer_ms / 1e3, bytes_per_token / (config.transfer_gb_s * 1e9)
        self.queue: deque[int] = deque()
        self.records: list[PrefillRecord] = []
        self._idle = deque(range(config.prefill_engines))  # asleep
        self._free = config.prefill_engines  # not prefilling, those about to look at the queue included
        self._link_s = [0.0] * config.prefill_engines  # when each has sent all
        self._landed = [0, 0]  # prompt and first tokens since the last step of the decoding engine

    def start(self, join: Callable[..., None], on_finish: Callable[[int], None]) -> None:
        """``join`` takes requests whose KV cache is there, ``on_finish`` those whose first token was the last."""
        self.join, self.on_finish = join, on_finish

    def submit(self, index: int) -> None:
        """A request arrives now."""
        self.recorder.last_arrival_s = self.lives.arrival_s[index] = self.env.now
        self.lives.status[index] = WAITING
        self.queue.append(index)
        if self._idle:
            self.env.process(self._prefill(self._idle.popleft()))

    def park(self, evicted: IntArray) -> None:
        """Requests that lost their memory come back when their KV cache has been moved once more."""
        for index in reversed(evicted.tolist()):
            self.env.process(self._return(index))

    def landed(self) -> tuple[int, int]:
        """Prompt tokens and first tokens that arrived since the last call."""
        tokens, first = self._landed
        self._landed = [0, 0]
        return tokens, first

    def close(self) -> None:
        """The run is over: tokens that came after the last step belong to a step of no length."""
        tokens, first = self.landed()
        if first:
            now, steps = self.env.now, self.recorder.steps
            step: dict[str, float] = dict.fromkeys(StepRecord._fields, 0)
            step |= {"step": len(steps), "start_s": now, "end_s": now, "prefill_tokens": tokens, "first_tokens": first}
            steps.append(tuple(step.values()))

    def _transfer_s(self, index: int) -> float:
        return self._latency_s + int(self.lives.context[index]) * self._token_s

    def _take(self) -> list[int]:
        """The next prompts, in order: a fair share where other engines are free as well."""
        share, tokens = -(-len(self.queue) // self._free), 0
        taken: list[int] = []
        while len(taken) < share:
            tokens += int(self.lives.prompt[self.queue[0]])
            if taken and tokens > self.max_tokens:
                break
            taken.append(self.queue.popleft())
        return taken

    def _prefill(self, engine: int) -> Process:
        """One engine, until nobody waits."""
        lives, env = self.lives, self.env
        while self.queue:
            taken, start_s = self._take(), env.now
            self._free -= 1
            lives.admitted_s[taken] = start_s
            prompts = lives.prompt[taken]
            total, attended = int(prompts.sum()), float((prompts * prompts / 2).sum())
            yield env.timeout(self.cost.step(0, 0, 0, 0.0, prefill=total, prefill_context=attended / total).total)
            self._free += 1
            for index in taken:
                landed_s = max(self._link_s[engine], env.now) + self._transfer_s(index)
                self._link_s[engine] = landed_s
                self.records.append(PrefillRecord(index, engine, start_s, env.now, landed_s))
                env.process(self._land(index, landed_s - env.now))
        self._idle.append(engine)

    def _land(self, index: int, seconds: float) -> Process:
        """A prompt's KV cache is sent; the user gets the first token."""
        yield self.env.timeout(seconds)
        lives, now_s = self.lives, self.env.now
        lives.first_token_s[index] = lives.emitted_s[index] = now_s
        lives.done[index] += 1
        lives.context[index] += 1
        self._landed[0] += int(lives.prompt[index])
        self._landed[1] += 1
        if lives.done[index] < lives.want[index]:
            self.join(index)
            return
        lives.finish_s[index], lives.status[index] = now_s, FINISHED
        self.on_finish(index)

    def _return(self, index: int) -> Process:
        yield self.env.timeout(self._transfer_s(index))
        self.join(index, first=True)
