"""What becomes of every request: one table from which all else reads."""

from collections.abc import Sequence

import numpy as np

from adasim.kernels.form import COLUMNS
from adasim.types import FloatArray, IntArray, Request

STATUS = ("dropped", "waiting", "running", "finished")  # what ``Lives.status`` counts; dropped: until it arrives
DROPPED, WAITING, RUNNING, FINISHED = range(len(STATUS))


class Lives:
    """One row a request in ``table`` [requests, COLUMNS], which compiled code reads; its columns by name, and times.

    Args:
        requests: all requests of the run, by index.
        bases: where each request's luck starts, [requests].
    """

    domain: IntArray
    prompt: IntArray  # prompt tokens
    output: IntArray  # output tokens asked for
    want: IntArray  # output tokens it will get: less when an end token came first
    base: IntArray  # where its luck starts
    status: IntArray  # index into STATUS
    done: IntArray  # output tokens given
    context: IntArray  # tokens known: prompt + done, the next anchor counted
    prefill_left: IntArray  # tokens still to prefill; 0 = decoding
    held: IntArray  # private KV blocks
    shared: IntArray  # KV blocks in the prefix cache
    rounds: IntArray  # it took part in
    drafts: IntArray
    verified: IntArray
    accepted: IntArray
    evictions: IntArray
    draft_version: IntArray  # of the drafter in its last round
    cached: IntArray  # prompt tokens found in the prefix cache at first admission
    arrival_s: FloatArray  # times are NaN where it did not get that far
    admitted_s: FloatArray
    first_token_s: FloatArray
    emitted_s: FloatArray  # last chunk
    finish_s: FloatArray

    def __init__(self, requests: Sequence[Request], bases: IntArray) -> None:
        self.table: IntArray = np.zeros((len(requests), len(COLUMNS)), dtype=np.int64)
        for i, column in enumerate(COLUMNS):
            setattr(self, column, self.table[:, i])
        times = np.full((5, len(requests)), np.nan)
        self.arrival_s, self.admitted_s, self.first_token_s, self.emitted_s, self.finish_s = times
        self.domain[:] = [r.domain for r in requests]
        self.prompt[:] = self.context[:] = [r.prompt_len for r in requests]
        self.want[:] = self.output[:] = [r.output_len for r in requests]
        self.base[:] = bases

    def __len__(self) -> int:
        return len(self.table)
