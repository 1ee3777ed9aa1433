"""What verification showed, taken to the trainer: on rank 0, copied beside serving, written by a thread of its own.

The server fills buffers in a folder; who trains on them, and what becomes of that, is not its affair. Nothing that goes
wrong here may harm serving: the tap closes and says why.
"""

import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adasim.real.collect import Collector, Shown
from adasim.real.features import bits, likeliest
from adasim.real.opd_process import Folder
from adasim.real.samples import ReplayBuffer, Round, Sample
from adasim.real.sglang_plugin.settings import DOMAIN, ServedOpd
from adasim.real.shards import token_type
from adasim.types import IntArray

LOOK_S = 0.25  # between two looks at an idle trainer
AT_ONCE = 256  # rows of logits that are looked at together, which bounds memory
BEHIND = 1024  # steps that the thread may lag before new requests go untapped
logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """Rows on their way to the host: hidden states [S, taps * D], top tokens and probabilities of the last [R, TOP]."""

    hidden: Tensor
    ids: Tensor
    probs: Tensor
    accepted: Tensor  # [n]
    vocab: int
    done: Any  # an event of the device; None = there is nothing to wait for

    def arrive(self) -> Shown:
        """Wait for the device, not for what it was given since."""
        if self.done is not None:
            self.done.synchronize()
        ids = self.ids.numpy().astype(token_type(self.vocab))
        return Shown(bits(self.hidden), ids, self.probs.numpy().astype(np.float16))


class Tap:
    """Follows requests by SGLang's names.

    Args:
        opd: how much is kept of a request, and of how many; the folder where buffers go once somebody has prepared it:
            until then the newest samples wait in memory.
    """

    def __init__(self, opd: ServedOpd) -> None:
        self.opd, self.folder = opd, Folder(Path(opd.folder).expanduser())
        self.buffer = ReplayBuffer(opd.buffer)
        self.failed = ""
        self.untapped = 0  # requests that were left out because the thread lagged
        self._collector = Collector(self._take, opd.max_tokens, rejected=opd.positions == "all")
        self._requests: dict[str, tuple[int, Any]] = {}  # number and SGLang's Req
        self._next = self.sent = self._prepared_ns = 0
        self._begun: set[int] = set()  # had a round; the thread's, as are collector and buffer
        self._domains: list[str] = []  # what who trains calls them
        self._finished = "", ""  # name and domain of the request whose sample is made
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adasim-tap", daemon=True)
        self._thread.start()

    def prefill(self, requests: Sequence[Any], firsts: Sequence[int], hidden: Tensor, lengths: Sequence[int],
                logits: Tensor) -> None:  # fmt: skip
        """Parts of prompts were run.

        Args:
            requests: SGLang's Reqs [n].
            firsts, lengths: where each part begins, and its tokens [n].
            hidden: [sum of lengths or more, taps * D].
            logits: after the last token of each part [n, V].
        """
        self._guard(lambda: self._prefill(requests, firsts, hidden, lengths, logits))

    def round(self, names: Sequence[str], starts: IntArray, verify_lens: IntArray, whole: Sequence[bool], version: int,
              accepted: Tensor, hidden: Tensor, logits: Tensor) -> None:  # fmt: skip
        """A verification.

        Args:
            starts: positions of the anchors [n].
            verify_lens: [n], the anchor counted.
            whole: whose block was verified whole for the trainer's sake [n].
            version: of the drafter.
            accepted: drafts [n], on the device.
            hidden, logits: of whole blocks, [n * B, ...]; junk behind a block's length.
        """
        self._guard(lambda: self._round(names, starts, verify_lens, whole, version, accepted, hidden, logits))

    def finish(self, name: str) -> None:
        """SGLang has let a request go."""
        self._guard(lambda: self._let_go(name))

    def state(self) -> dict[str, Any]:
        """How it does."""
        return {
            "settings": self.opd.model_dump(mode="json"),
            "sent": self.sent,
            "waiting": self.buffer.fresh,
            "dropped": self.buffer.dropped,
            "untapped": self.untapped,
            "failed": self.failed,
        }

    def close(self) -> None:
        """Do what was taken, and stop."""
        self._work.put(None)
        self._thread.join()

    def _prefill(self, requests: Sequence[Any], firsts: Sequence[int], hidden: Tensor, lengths: Sequence[int],
                 logits: Tensor) -> None:  # fmt: skip
        for name in [name for name, (_, request) in self._requests.items() if request.finished()]:
            self._let_go(name)  # with its prompt, which SGLang does not tell
        chosen, begins = [], np.cumsum([0, *lengths[:-1]]).tolist()
        for i, request in enumerate(requests):
            if request.rid not in self._requests:
                if self._work.qsize() > BEHIND:
                    self.untapped += 1
                    continue
                self._requests[request.rid], self._next = (self._next, request), self._next + 1
            chosen.append(i)
        if not chosen:
            return
        copy = _copy(hidden[: sum(lengths)], logits)
        numbers = [self._requests[requests[i].rid][0] for i in chosen]
        prompts = [len(requests[i].origin_input_ids) for i in chosen]

        def absorb() -> None:
            shown = copy.arrive()
            for i, number, prompt_len in zip(chosen, numbers, prompts, strict=True):
                rows = slice(begins[i], begins[i] + lengths[i])
                part = Shown(shown.hidden[rows], shown.ids[i : i + 1], shown.probs[i : i + 1])
                self._collector.prefilled(number, part, firsts[i], prompt_len)

        self._work.put(absorb)

    def _round(self, names: Sequence[str], starts: IntArray, verify_lens: IntArray, whole: Sequence[bool], version: int,
               accepted: Tensor, hidden: Tensor, logits: Tensor) -> None:  # fmt: skip
        chosen = [i for i, name in enumerate(names) if name in self._requests]
        if not chosen:
            return
        block, lengths = len(logits) // len(names), verify_lens[chosen]
        at = np.array(chosen)[:, None] * block + np.arange(block)
        rows = torch.from_numpy(at[np.arange(block) < lengths[:, None]]).to(logits.device)
        copy = _copy(hidden, logits, accepted, rows)
        numbers = [self._requests[names[i]][0] for i in chosen]
        begins = (np.cumsum(lengths) - lengths).tolist()
        steps = [
            Round(int(starts[i]), int(verify_lens[i]), 0, version, bool(whole[i])) for i in chosen
        ]  # whose acceptance only the device knows

        def absorb() -> None:
            shown, run = copy.arrive(), copy.accepted.tolist()
            for i, number, step, begin in zip(chosen, numbers, steps, begins, strict=True):
                if number not in self._begun:
                    self._begun.add(number)
                    self._tell(begun=number, version=version)
                part = shown.part(slice(begin, begin + step.verify_len))
                self._collector.verified(number, step._replace(accepted=run[i]), part)

        self._work.put(absorb)

    def _let_go(self, name: str) -> None:
        """Queue a request's end."""
        found = self._requests.pop(name, None)
        if found is not None:
            number, request = found
            tokens = [*request.origin_input_ids, *request.output_ids_through_stop]
            domain = str((request.sampling_params.custom_params or {}).get(DOMAIN, "default"))
            self._work.put(lambda: self._finish(number, name, tokens, domain))

    def _finish(self, number: int, name: str, tokens: list[int], domain: str) -> None:
        self._begun.discard(number)
        self._finished = name, domain
        known = self._prepared() and domain in self._domains
        self._collector.finish(number, tokens, self._domains.index(domain) if known else 0)

    def _take(self, sample: Sample) -> None:
        """A finished request's sample, from the collector."""
        name, domain = self._finished
        versions = [[version, sum(1 for _ in rounds)] for version, rounds in groupby(r.version for r in sample.rounds)]
        self._tell(finished=sample.lesson.text.index, name=name, domain=domain, tau=sample.tau, versions=versions)
        self.buffer.add(sample)

    def _tell(self, **said: Any) -> None:
        """One line for those who judge versions, where there are any."""
        if self._prepared():
            with self.folder.served.open("a") as file:
                file.write(json.dumps(said) + "\n")

    def _prepared(self) -> bool:
        """Whether somebody trains; one who begins anew begins with no buffers."""
        try:
            stamp = self.folder.settings.stat().st_mtime_ns
            if stamp != self._prepared_ns:
                self._domains = json.loads(self.folder.settings.read_text())["domains"]
                self._prepared_ns, self.sent = stamp, 0
        except FileNotFoundError:
            return False
        return True

    def _hand_over(self) -> None:
        """A full buffer goes to a trainer that has done the last one."""
        if self.buffer.full and self._prepared() and self.folder.trained(self.sent):
            self.folder.send(self.sent + 1, self.buffer.take(), keep=self.opd.keep is not None)
            self.sent += 1

    def _run(self) -> None:
        """The thread."""
        while True:
            try:
                work = self._work.get(timeout=LOOK_S)
            except queue.Empty:
                work = _nothing
            if work is None:
                return
            if not self.failed:
                self._guard(work)
                self._guard(self._hand_over)

    def _guard(self, work: Callable[[], None]) -> None:
        """Serving goes on, whatever happens here."""
        if self.failed:
            return
        try:
            work()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            self._requests.clear()
            logger.exception("ADAFLASH: the tap is closed, nothing is trained any more; serving goes on")


def _copy(hidden: Tensor, logits: Tensor, accepted: Tensor | None = None, rows: Tensor | None = None) -> _Copy:
    """Begin the copy to the host of rows [S] (None: all) that the next step may overwrite."""
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    else:
        hidden = hidden[rows]
    parts = [likeliest(logits[part]) for part in torch.split(rows, AT_ONCE)]
    ids, probs = (torch.cat(x) for x in zip(*parts, strict=True))
    accepted = torch.empty(0) if accepted is None else accepted
    kept, ids, probs, accepted = (
        x.to("cpu", copy=True, non_blocking=True) for x in (hidden.to(torch.bfloat16), ids, probs, accepted)
    )
    done = None
    if hidden.device.type != "cpu":
        done = torch.get_device_module(hidden.device).Event()
        done.record()
    return _Copy(kept, ids, probs, accepted, logits.shape[-1], done)


def _nothing() -> None:
    pass
