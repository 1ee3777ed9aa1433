"""Steps of recorded runs as rows to fit times to."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from adasim.calibration.estimate.recording import RecordedTrial
from adasim.calibration.estimate.regression import HUBER
from adasim.errors import InputError
from adasim.records import Records
from adasim.types import FloatArray

TOKENS_BIN, CONTEXT_BIN = 0.03, 0.15  # of logarithms: what is that close together is one cell
BLOCK_S = 20.0  # in which a machine's speed is taken to be steady
PASSES = 8  # of the robust fit of the machine's speed
SPLITS = 5  # of cells into halves, to see how well they tell the machine's speed
LEAST_TIES = 4  # cells that a block must share with others for its speed to be told
EXACT = 1e-9  # of logarithms: half of the cells fit to the last digit, and weights would all be 0
SKIPPED = 1  # rounds at a run's start: they pay for what later ones find ready


def rounds_table(trials: Sequence[RecordedTrial]) -> pd.DataFrame:
    """Rounds without prefill, all trials.

    Columns: block (what was measured close together in time), trial (index), batch, tokens (verified, the whole batch),
    context (mean), drafting (requests that drafted), positions (drafted, anchors counted), verify_s, draft_s, overhead_s
    (the pause before the step included: scheduling), reads (what heads were asked for), reads_head, drafter_loaded,
    ragged (requests verified different lengths).

    Raises:
        InputError: there are none.
    """
    parts, names = [], blocks(trials)
    for i, trial in enumerate(trials):
        steps = trial.records.steps
        gap_s = pauses(trial)
        drafting = _drafting(trial)
        decoding = steps["decoding"] > 0
        reads = np.full(len(steps), "", dtype=object)
        reads[decoding.to_numpy()] = trial.reads(int(decoding.sum()))
        rounds = decoding & (steps["prefill_tokens"] == 0)
        rounds &= rounds.cumsum() > SKIPPED
        part = pd.DataFrame(
            {
                "batch": steps["decoding"],
                "tokens": steps["verify_tokens"],
                "context": steps["context"],
                "drafting": drafting,
                "positions": steps["draft_tokens"] + drafting,
                "verify_s": steps["verify_s"],
                "draft_s": steps["draft_s"],
                "overhead_s": steps["overhead_s"] + gap_s,
                "reads": reads,
                "reads_head": reads != "",
                "ragged": ragged(trial.records),
            }
        )[rounds]
        parts.append(part.assign(block=names[i], trial=i, drafter_loaded=trial.drafter_loaded))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if table.empty:
        raise InputError("cost: no round without prefill was recorded")
    return table


def prefills_table(trials: Sequence[RecordedTrial]) -> pd.DataFrame:
    """Steps that prefill and do nothing else: block, tokens, prefill_s (the pause before the step included),
    drafter_loaded (it takes the prompt's hidden states in).
    """
    parts, names = [], blocks(trials)
    for trial, name in zip(trials, names, strict=True):
        forced = trial.backend.get("forced") or {}
        if forced.get("prefill") is False:  # prompts were not computed
            continue
        steps = trial.records.steps
        alone = (steps["prefill_tokens"] > 0) & (steps["decoding"] == 0)
        seconds = steps["prefill_s"] + pauses(trial)
        part = pd.DataFrame({"tokens": steps["prefill_tokens"], "prefill_s": seconds})[alone & (steps["step"] > 0)]
        parts.append(part.assign(block=name, drafter_loaded=trial.drafter_loaded))
    columns = ["tokens", "prefill_s", "block", "drafter_loaded"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def blocks(trials: Sequence[RecordedTrial]) -> list[str]:
    """What was measured close together in time, a name for each trial.

    Runs that began at the same moment took turns and share one, however long. A run of ``BLOCK_S`` seconds or more is a
    block of its own; shorter ones that follow each other share one.
    """
    together = Counter(t.began_s for t in trials)
    order = sorted(range(len(trials)), key=lambda i: (trials[i].began_s or 0.0, i))
    names, block, since = [""] * len(trials), 0, -np.inf
    for i in order:
        trial = trials[i]
        lasts = float(trial.records.steps["end_s"].iloc[-1])
        if trial.began_s is not None and together[trial.began_s] > 1:
            names[i] = f"turns at {trial.began_s:.3f}"
            continue
        if trial.began_s is None or lasts >= BLOCK_S:
            names[i] = trial.key
            continue
        if trial.began_s > since + BLOCK_S:
            block, since = block + 1, trial.began_s
        names[i] = f"stretch {block}"
    return names


def ragged(records: Records) -> NDArray[np.bool_]:
    """Steps whose requests verified different lengths and were not padded, [steps]; without a rounds table, none."""
    steps, rounds = records.steps, records.rounds
    if rounds is None or rounds.empty:
        return np.zeros(len(steps), dtype=np.bool_)
    longest = rounds.groupby("step")["verify_len"].max().reindex(steps["step"]).fillna(0).to_numpy()
    return np.asarray(steps["verify_tokens"].to_numpy() < longest * steps["decoding"].to_numpy())


def _drafting(trial: RecordedTrial) -> FloatArray:
    """Requests that drafted, by step: those of the rounds table, else all where anything was drafted."""
    steps, rounds = trial.records.steps, trial.records.rounds
    if rounds is None:
        every = np.where(steps["draft_tokens"] > 0, steps["decoding"], 0)
        return np.asarray(every, dtype=np.float64)
    counts = rounds[rounds["draft_len"] > 0].groupby("step").size()
    return np.asarray(counts.reindex(steps["step"]).fillna(0), dtype=np.float64)


def pauses(trial: RecordedTrial) -> FloatArray:
    """Seconds between a step and the one before while requests were there, and nothing rare (a reload) happened."""
    records = trial.records
    start, end = records.steps["start_s"].to_numpy(), records.steps["end_s"].to_numpy()
    gap = np.concatenate([[0.0], start[1:] - end[:-1]])
    before = np.concatenate([[0.0], end[:-1]])
    arrived = np.searchsorted(np.sort(records.requests["arrival_s"].dropna()), before, side="right")
    finished = np.searchsorted(np.sort(records.requests["finish_s"].dropna()), before, side="right")
    events = np.sort(records.events["time_s"].to_numpy(dtype=float)) if len(records.events) else np.empty(0)
    rare = np.searchsorted(events, start, side="right") > np.searchsorted(events, before, side="left")
    return np.where((arrived > finished) & ~rare, np.maximum(gap, 0.0), 0.0)


def cells(rows: pd.DataFrame, value: str, flags: Sequence[str] = ()) -> pd.DataFrame:
    """Medians of ``value`` over rows that are alike, one a block and cell.

    Columns: block, cell (a number), mean batch, tokens, context, positions, drafting of its rows, ``flags``, ``value``,
    count. Steps whose value is 0 or below are left out: nothing was done.
    """
    kept = rows[rows[value] > 0]
    place = pd.DataFrame(
        {
            "t": np.rint(np.log(kept["tokens"].clip(lower=1)) / TOKENS_BIN),
            "c": np.rint(np.log(kept["context"].clip(lower=1)) / CONTEXT_BIN) if "context" in kept else 0.0,
            "p": np.rint(np.log(kept["positions"] + 1) / TOKENS_BIN) if "positions" in kept else 0.0,
        },
        index=kept.index,
    )
    known = [c for c in ("batch", "tokens", "context", "positions", "drafting") if c in kept]
    same = [place["t"], place["c"], place["p"], *(kept[f] for f in flags)]
    if "batch" in kept:
        same.append(kept["batch"].rename("b"))
    kept = kept.assign(cell=kept.groupby(same).ngroup())
    how = {name: (name, "mean") for name in known} | {f: (f, "first") for f in flags} | {value: (value, "median")}
    return kept.groupby(["block", "cell"], as_index=False).agg(**how, count=(value, "size"))


@dataclass(frozen=True, slots=True)
class Speed:
    """How much slower than usual the machine was.

    Attributes:
        factors: of times, by block; 1 where nothing ties a block to others.
        tied: blocks that share a cell with another.
        errors: what the logarithms of the factors may be off, [cases, blocks]: half the difference between factors of
            two halves of the cells.
    """

    factors: "pd.Series[float]"
    tied: int
    errors: FloatArray

    @property
    def unsure(self) -> float:
        """Standard error of the logarithm of the usual speed, the median of what drifted."""
        logs = np.log(self.factors.to_numpy(dtype=float))
        return 1.2533 * float(logs.std(ddof=1)) / np.sqrt(len(logs)) if len(logs) > 1 else 0.0

    def cases(self, table: pd.DataFrame, seed: int, draws: int) -> FloatArray:
        """What steady times of the rows may be instead, as factors, [draws, rows]: other usual speeds, other factors."""
        rng = np.random.default_rng([seed, 4])
        at = self.factors.index.get_indexer(pd.Index(table["block"]))
        usual = self.unsure * rng.standard_normal((draws, 1))
        return np.exp(usual + self.errors[rng.integers(len(self.errors), size=draws)][:, at])

    def steady_ms(self, table: pd.DataFrame, value: str) -> FloatArray:
        """Milliseconds of ``value`` (seconds) as on the machine at its usual speed, [rows]."""
        slow = table["block"].map(self.factors).fillna(1.0).to_numpy(dtype=float)
        return 1e3 * table[value].to_numpy(dtype=float) / slow


def machine_speed(trials: Sequence[RecordedTrial]) -> Speed:
    """The machine's speed in every block, by steps that several blocks made, whatever part of them.

    Logarithms of times are a cell's plus a block's.
    """
    rounds, prefills = rounds_table(trials), prefills_table(trials)
    parts = {
        "verify_s": cells(rounds, "verify_s", ("drafter_loaded", "ragged")),
        "draft_s": cells(rounds, "draft_s", ("reads",)),
        "overhead_s": cells(rounds, "overhead_s", ("reads_head", "drafter_loaded")),
        "prefill_s": cells(prefills, "prefill_s", ("drafter_loaded",)),
    }
    kept = [
        pd.DataFrame(
            {"block": t["block"], "cell": [f"{name} {c}" for c in t["cell"]], "y": np.log(t[name]), "count": t["count"]}
        )
        for name, t in parts.items()
        if len(t)
    ]
    table = pd.concat(kept, ignore_index=True)
    factors = pd.Series(0.0, index=pd.Index(sorted(table["block"].unique(), key=_in_order(trials)), name="block"))
    part = _ties(table)
    if part.empty:
        return Speed(factors + 1.0, 0, np.zeros((1, len(factors))))
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(SPLITS):
        half = part["cell"].isin(rng.permutation(part["cell"].unique())[::2])
        one, other = (_factors(part[h], factors.index).to_numpy() for h in (half, ~half))
        errors += [(one - other) / 2, (other - one) / 2]
    return Speed(_factors(part, factors.index).map(np.exp), part["block"].nunique(), np.array(errors))


def _ties(table: pd.DataFrame) -> pd.DataFrame:
    """Cells that several blocks share, of blocks that share enough: one odd step must not make a machine slow."""
    while True:
        table = table[table.groupby("cell")["block"].transform("nunique") > 1]
        few = table.groupby("block")["cell"].transform("size") < LEAST_TIES
        if not few.any():
            return table
        table = table[~few]


def _factors(part: pd.DataFrame, index: "pd.Index[str]") -> "pd.Series[float]":
    """Logarithms of the factors of blocks: y = cell + block by Huber's rule, all blocks at once.

    (Medians in turn would not do: two runs that share much hold each other where they are, whatever ties them to others.)
    """
    block, cell = index.get_indexer(pd.Index(part["block"])), pd.factorize(part["cell"])[0]
    y, found = part["y"].to_numpy(), np.zeros(len(index))
    prior = np.sqrt(part["count"].to_numpy(dtype=float))
    weight = prior
    for _ in range(PASSES):
        share = np.zeros((cell.max() + 1, len(index)))
        np.add.at(share, (cell, block), weight)
        total = share.sum(axis=1)
        mean = np.bincount(cell, weights=weight * y) / total
        normal = np.diag(share.sum(axis=0)) - share.T @ (share / total[:, None])
        right = np.bincount(block, weights=weight * (y - mean[cell]), minlength=len(index))
        found = np.linalg.lstsq(normal, right, rcond=1e-9)[0]
        level = np.bincount(cell, weights=weight * (y - found[block])) / total
        off = np.abs(y - level[cell] - found[block])
        spread = 1.4826 * float(np.median(off))
        if spread < EXACT:
            break
        weight = prior * np.minimum(1.0, HUBER * spread / np.maximum(off, EXACT))
    tied = np.isin(np.arange(len(index)), block)
    return pd.Series(np.where(tied, found - np.median(found[tied]), 0.0), index=index)


def _in_order(trials: Sequence[RecordedTrial]) -> Callable[[str], int]:
    """Key that sorts blocks by when they were measured."""
    names = blocks(trials)
    order = sorted(range(len(trials)), key=lambda i: (trials[i].began_s or 0.0, i))
    first = {names[i]: n for n, i in reversed(list(enumerate(order)))}
    return lambda name: first[name]
