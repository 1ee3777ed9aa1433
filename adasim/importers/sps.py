"""SGLang's SPS tables (JSON), read and written: what a step of so many requests and tokens takes.

The additive form is ``bias + alpha(requests) + theta(tokens)`` seconds over two probe lists, linear in between; the older
one lists steps per second by tokens. Tokens are those verified, anchors counted.
Source: sgl-project/sglang, speculative/dspark_components/dspark_sps.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from adasim.errors import InputError
from adasim.importers.fields import Malformed, needed, number, numbers
from adasim.importers.head import Head
from adasim.importers.sink import Sink
from adasim.importers.source import Source
from adasim.importers.tables import CostRow

ADDITIVE = ("bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
PLAIN = ("sample_batch_tokens", "sample_steps_per_sec")


def recognises(head: Head) -> bool:
    """Either form."""
    return {"m_probes", "theta_seconds"} <= head.keys or set(PLAIN) <= head.keys


def read(source: Source, sink: Sink) -> None:
    """Fill cost points of whole steps: of every pair of probes that can be, or of every token count."""
    for stream in source.documents():
        with source.guard(stream):
            found = stream.value()
            if not isinstance(found, dict):
                raise Malformed(f"holds {type(found).__name__}, allowed: an object")
            sink.extend(points(source.name, found))


def points(name: str, table: dict[str, Any]) -> list[CostRow]:
    """Cost points of a table.

    Raises:
        Malformed: lists that do not fit together.
    """
    if PLAIN[0] in table:
        tokens, rate = (numbers(table.get(n), n) for n in PLAIN)
        _probes(PLAIN[0], tokens, PLAIN[1], rate)
        return [CostRow(name, "step", None, int(m), None, 1e3 / r) for m, r in zip(tokens, rate, strict=True)]
    batches, alpha, tokens, theta = (numbers(table.get(n), n, low=-np.inf) for n in ADDITIVE)
    _probes(ADDITIVE[0], batches, ADDITIVE[1], [1.0] * len(alpha))
    _probes(ADDITIVE[2], tokens, ADDITIVE[3], [1.0] * len(theta))
    bias = needed(number(table, "bias_seconds", low=-np.inf), "bias_seconds")
    rows = []
    for n, a in zip(batches, alpha, strict=True):
        for m, t in zip(tokens, theta, strict=True):
            if m >= n:  # every request has at least its anchor verified
                if bias + a + t <= 0:
                    raise Malformed(f"{n:g} requests with {m:g} tokens take {bias + a + t:.3g} s, allowed: more than 0")
                rows.append(CostRow(name, "step", int(n), int(m), None, 1e3 * (bias + a + t)))
    return rows


def table_of(rows: Sequence[CostRow]) -> dict[str, Any]:
    """The additive table nearest to cost points (least squares of relative errors), and its error.

    ``alpha`` of the smallest batch and ``theta`` of the fewest tokens are 0: the bias holds what all steps cost.

    Raises:
        InputError: points without batch or tokens, or that do not connect batches and token counts.
    """
    cells = [(r.batch, r.tokens, r.ms / 1e3) for r in rows if r.batch is not None and r.tokens is not None]
    if not cells or len(cells) < len(rows):
        raise InputError("sps: every cost point needs batch and tokens")
    batches, tokens = sorted({b for b, _, _ in cells}), sorted({t for _, t, _ in cells})
    design = np.zeros((len(cells), 1 + len(batches) + len(tokens)))
    seconds = np.array([s for _, _, s in cells])
    for i, (b, t, _) in enumerate(cells):
        design[i, [0, 1 + batches.index(b), 1 + len(batches) + tokens.index(t)]] = 1
    used = [c for c in range(design.shape[1]) if c not in {1, 1 + len(batches)}]
    scaled = design[:, used] / seconds[:, None]
    if np.linalg.matrix_rank(scaled) < len(used):
        raise InputError(
            "sps: these points do not tell requests and tokens apart; measure token counts at several batches"
        )
    solved = np.zeros(design.shape[1])
    solved[used] = np.linalg.lstsq(scaled, np.ones(len(cells)), rcond=None)[0]
    return {
        "bias_seconds": float(solved[0]),
        "bs_probes": batches,
        "alpha_seconds": solved[1 : 1 + len(batches)].tolist(),
        "m_probes": tokens,
        "theta_seconds": solved[1 + len(batches) :].tolist(),
    }


def _probes(name: str, probes: list[float], other: str, values: list[float]) -> None:
    if not probes or len(probes) != len(values):
        raise Malformed(f"{name} and {other} must be equally long lists, not {len(probes)} and {len(values)} long")
    if any(b <= a for a, b in pairwise(probes)) or probes[0] < 1 or any(p % 1 for p in probes):
        raise Malformed(f"{name} must be rising whole numbers >= 1")
    if any(v <= 0 for v in values):
        raise Malformed(f"{other} must be numbers > 0")
