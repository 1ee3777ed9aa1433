"""Records of a run on SGLang: the server's steps replayed over the requests, and held against what it says of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adasim.calibration.alarm import Alarm
from adasim.real.sglang_client.collector import Collector
from adasim.real.sglang_client.traffic import Traffic
from adasim.real.sglang_plugin.rounds import Entry, Prefill, Round
from adasim.real.sglang_plugin.turn import own_seconds
from adasim.records import Records, StepRecord
from adasim.serving.lives import FINISHED, RUNNING, WAITING, Lives
from adasim.serving.monitor import Finished, Monitor
from adasim.serving.recorder import Recorder
from adasim.types import IntArray, Request


@dataclass(slots=True)
class Replay:
    """Follows the server's steps. Seconds are counted from ``began_s`` on the server's clock.

    Attributes:
        requests: of the run, with the lengths of the prompts they had.
        domains: their names.
        block: positions of a full block, the anchor counted.
        block_tokens: tokens of a KV block.
        began_s: when the run began, on the server's clock.
        alarm: watches tau; None = nobody does.
        strangers: requests in its steps that are not of this run.
    """

    requests: Sequence[Request]
    domains: Sequence[str]
    block: int
    block_tokens: int
    began_s: float
    alarm: Alarm | None = None
    strangers: int = 0
    lives: Lives = field(init=False)
    recorder: Recorder = field(init=False)
    _monitor: Monitor | None = None

    def __post_init__(self) -> None:
        self.lives = Lives(self.requests, np.zeros(len(self.requests), dtype=np.int64))
        self.recorder = Recorder(self.domains, self.block, rounds=True)
        if self.alarm is not None:
            recorder = self.recorder
            self._monitor = Monitor(self.alarm, self.domains, lambda: recorder.draft_version, recorder.events)

    def run(self, traffic: Traffic, collector: Collector, began_s: float, name: str) -> None:
        """All that was sent and all steps.

        Args:
            began_s: when the run began, on this machine's clock.
            name: what SGLang's ids of its requests begin with.
        """
        tokens = {i: int(a["meta_info"]["completion_tokens"]) for i, a in traffic.answers.items()}
        own_s = own_seconds([h for h in collector.held if h[1] > self.began_s])
        here_s = self.began_s - began_s  # the server's clock less this machine's
        self.sent({i: own_s(s + here_s) - self.began_s for i, s in traffic.sent_s.items()}, tokens)
        own = {n: int(full.removeprefix(name)) for n, full in collector.names.items() if full.startswith(name)}
        for entry in collector.steps:
            self.play(entry._replace(start_s=own_s(entry.start_s), end_s=own_s(entry.end_s)), own)

    def sent(self, sent_s: Mapping[int, float], tokens: Mapping[int, int]) -> None:
        """When requests were sent, seconds of the run, and the tokens that those that finished were given."""
        for index, at_s in sent_s.items():
            self.lives.arrival_s[index], self.lives.status[index] = at_s, WAITING
        for index, count in tokens.items():
            self.lives.want[index] = count
        self.recorder.last_arrival_s = max(sent_s.values(), default=0.0)

    def play(self, entry: Entry, index_of: Mapping[int, int]) -> None:
        """One step, in order. Args: index_of: a request's index by its number in steps; others are not of this run."""
        indices = [index_of.get(number) for number in entry.requests]
        self.strangers += indices.count(None)
        rows = [row for row, index in enumerate(indices) if index is not None and self._takes_part(index)]
        if not rows:  # overlapped scheduling: a round for requests that had just finished
            return
        self.recorder.draft_version = entry.draft_version
        ids = np.array([indices[row] for row in rows], dtype=np.int64)
        if isinstance(entry, Prefill):
            self._prefill(entry, rows, ids)
        else:
            self._round(entry, rows, ids)

    def records(self) -> Records:
        """All tables."""
        return self.recorder.records(self.lives)

    def against(self, answers: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """What the steps and SGLang's own counts of a request disagree on, a line each."""
        lives, found = self.lives, []
        for index, answer in sorted(answers.items()):
            meta = answer["meta_info"]
            counts = {
                "completion_tokens": int(lives.done[index]),
                "prompt_tokens": int(lives.prompt[index]),
                "spec_verify_ct": int(lives.rounds[index]),
                "spec_num_correct_drafts": int(lives.accepted[index]),
            }
            found += [
                f"request {index}: SGLang counts {meta[name]} {name}, its round records {count}"
                for name, count in counts.items()
                if name in meta and meta[name] != count
            ]
        return found

    def _takes_part(self, index: int) -> bool:
        return bool(self.lives.status[index] != FINISHED)

    def _prefill(self, entry: Prefill, rows: Sequence[int], ids: IntArray) -> None:
        lives, end_s = self.lives, entry.end_s - self.began_s
        first, gaps = 0, []
        for row, index in zip(rows, ids.tolist(), strict=True):
            if np.isnan(lives.admitted_s[index]):
                lives.admitted_s[index], lives.status[index] = entry.start_s - self.began_s, RUNNING
            if entry.context_lens[row] < lives.prompt[index] + lives.done[index]:
                continue  # a chunk
            if np.isnan(lives.first_token_s[index]):
                lives.first_token_s[index] = end_s
            else:  # it was sent back to the queue, and has been computed again
                lives.evictions[index] += 1
                gaps.append(end_s - lives.emitted_s[index])
            lives.emitted_s[index] = end_s
            lives.done[index] += 1
            lives.context[index] = lives.prompt[index] + lives.done[index]
            first += 1
        if gaps:
            self.recorder.gaps(np.array(gaps))
        self._end(ids, end_s)
        seconds = entry.end_s - entry.start_s
        self._step(entry, first_tokens=first, prefill_tokens=sum(entry.tokens), prefill_s=seconds)

    def _round(self, entry: Round, rows: Sequence[int], ids: IntArray) -> None:
        lives, end_s = self.lives, entry.end_s - self.began_s
        drafts, verified, accepted = (
            np.array([values[row] for row in rows], dtype=np.int64)
            for values in (entry.draft_lens, entry.verify_lens, entry.accepted)
        )
        shown, whole, confidence = (
            None if values is None else np.array([values[row] for row in rows])
            for values in (entry.accept_lens, entry.whole, entry.confidences)
        )
        version = entry.draft_version
        assert self.recorder.rounds is not None
        self.recorder.rounds.add(
            len(self.recorder.steps), ids, lives, drafts, verified, accepted, shown, whole, version, confidence
        )  # fmt: skip
        lives.draft_version[ids] = version
        emitted = np.minimum(accepted + 1, lives.want[ids] - lives.done[ids])
        for column, more in (
            (lives.rounds, 1), (lives.drafts, drafts), (lives.verified, verified), (lives.accepted, accepted),
            (lives.done, emitted), (lives.context, emitted),
        ):  # fmt: skip
            column[ids] += more
        np.add.at(self.recorder.blocks, (lives.domain[ids], verified, accepted), 1)
        self.recorder.gaps(end_s - lives.emitted_s[ids])
        lives.emitted_s[ids] = end_s
        self._end(ids, end_s)
        self._step(
            entry, decoding=len(entry.requests), draft_tokens=sum(entry.draft_lens), verify_tokens=sum(entry.verify_lens),
            accepted=int(accepted.sum()), emitted=int(emitted.sum()), draft_s=entry.draft_s, verify_s=entry.verify_s,
            overhead_s=max(entry.end_s - entry.start_s - entry.draft_s - entry.verify_s, 0.0),
            context=float(np.mean(entry.context_lens)),
        )  # fmt: skip

    def _end(self, ids: IntArray, end_s: float) -> None:
        """Requests that have all their tokens."""
        done = ids[self.lives.done[ids] >= self.lives.want[ids]]
        self.lives.finish_s[done], self.lives.status[done] = end_s, FINISHED
        if self._monitor is not None:
            for index in done.tolist():
                self._monitor.on_finish(Finished.of(self.lives, index))

    def _step(self, entry: Entry, **counts: Any) -> None:
        counted = ("decoding", "prefill_tokens", "draft_tokens", "verify_tokens", "accepted", "emitted", "first_tokens")
        known: dict[str, Any] = dict.fromkeys(counted, 0)
        known |= dict.fromkeys(("draft_s", "verify_s", "overhead_s", "prefill_s", "context"), 0.0)
        known |= {"step": len(self.recorder.steps), "queued": entry.queued, "evicted": 0}
        known |= {"draft_version": self.recorder.draft_version}
        known |= {"start_s": entry.start_s - self.began_s, "end_s": entry.end_s - self.began_s}
        known |= {"kv_blocks": -(-entry.kv_tokens // self.block_tokens)}
        self.recorder.steps.append(StepRecord(**(known | counts)))
