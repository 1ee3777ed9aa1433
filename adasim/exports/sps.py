"""SGLang's SPS table: seconds of a step by requests and verified tokens, from which DSPARK takes its budget.

Format: ``--speculative-dspark-sps-table-path``, see :mod:`adasim.importers.sps`. A step is a whole round: draft,
verification, overhead; the drafter fills full blocks, as DSPARK's does.
"""

import numpy as np

from adasim.errors import InputError
from adasim.exports.export import Export
from adasim.exports.source import Source
from adasim.importers.sps import table_of
from adasim.importers.tables import CostRow

NAME = "sps_table.json"
LEAST_BIAS = 1e-6  # seconds; SGLang asks for more than 0


def export(source: Source) -> Export:
    """The additive table nearest to the cost, at doubling batches and lengths.

    Raises:
        InputError: the cost covers too little to tell requests and tokens apart.
    """
    rows = points(source)
    table = table_of(rows)
    move = max(LEAST_BIAS - table["bias_seconds"], 0.0)  # a constant may stand in either term
    table["bias_seconds"] += move
    table["theta_seconds"] = [t - move for t in table["theta_seconds"]]
    batch, tokens = table["bs_probes"], table["m_probes"]
    off = [abs(1e3 * _seconds(table, r) / r.ms - 1) for r in rows]
    outside = {o: None for r in rows for o in source.outside(r.batch or 0, r.tokens or 0)}
    says = [
        f"bias + alpha(requests) + theta(tokens) leaves {np.mean(off):.1%} of a step on average, {max(off):.1%} at most",
        f"time at contexts of {source.context:.0f} tokens; longer ones are not expressed",
        f"requests beyond {batch[-1]} cost as {batch[-1]}, tokens beyond {tokens[-1]} as {tokens[-1]}: SGLang clamps",
        "for DSPARK with SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept; ADAFLASH takes its cost from its own settings",
    ]
    about = source.about() | {"format": "SpsAdditiveCostTable of SGLang 0.5.23", "extrapolates": list(outside)}
    about |= {"fit": {"points": len(rows), "mean_error": float(np.mean(off)), "worst_error": float(max(off))}}
    flags = [f"--speculative-dspark-sps-table-path {NAME}"]
    return Export("SGLang SPS table", NAME, table, about, flags, says, comments=True)


def points(source: Source) -> list[CostRow]:
    """Rounds of doubling batches and lengths, as far as the cost covers them."""
    block = source.max_draft_len + 1
    batches = _doubling(source.max_batch)
    rows = []
    for n in batches:
        for tokens in sorted({n * length for length in _doubling(block)}):
            try:
                step = source.cost.step(n, n * block, tokens, source.context, longest_draft=block - 1, reads_head=True)
            except InputError:  # outside what was measured
                continue
            rows.append(CostRow(source.name, "step", n, tokens, None, 1e3 * step.total))
    if not rows:
        raise InputError(f"{source.name}: its cost covers no round of 1..{source.max_batch} requests")
    return rows


def _doubling(last: int) -> list[int]:
    return sorted({*(2**i for i in range(last.bit_length())), last})


def _seconds(table: dict[str, object], row: CostRow) -> float:
    bias, n, alpha, m, theta = (
        np.asarray(table[k]) for k in ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
    )
    assert row.batch is not None
    assert row.tokens is not None
    return float(bias + np.interp(row.batch, n, alpha) + np.interp(row.tokens, m, theta))
