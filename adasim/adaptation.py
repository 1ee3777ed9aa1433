"""What a changing drafter did, from its records: costs, versions, alarms, and whether it paid back."""

from dataclasses import dataclass
from math import inf, isnan, nan
from typing import TYPE_CHECKING

import numpy as np

from adasim.records import Records

if TYPE_CHECKING:
    import pandas as pd

LATE = 0.2  # share of a run's tokens, the last ones, that show where it ended up
BINS = 40
FEW = 5  # a bin with fewer requests shows nothing


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run over time."""

    policy: str
    place: str
    tau: "pd.DataFrame"  # domain, time_s, tau (NaN: hardly any requests); domain "" = all
    events: "pd.DataFrame"  # EventRecord columns
    versions: "pd.DataFrame"  # domain, draft_version, rounds, tau: what each version that served accepted


def summary(records: Records) -> dict[str, float]:
    """Metrics of a run whose drafter learns or whose tau is watched, over the whole run; empty for others."""
    row: dict[str, float] = {}
    if records.versions is not None:
        row |= _costs(records, records.versions)
    if (records.events["kind"] == "watch").any():
        row |= _alarms(records.events)
    return row


def _costs(records: Records, versions: "pd.DataFrame") -> dict[str, float]:
    """GPU-seconds of serving (pauses counted, training not) and of training, and tokens."""
    steps, each = records.steps, versions.drop_duplicates("version")
    loaded = records.events[records.events["kind"] == "reload"]
    seconds = (steps["end_s"] - steps["start_s"]).to_numpy()
    tokens = np.cumsum(steps["emitted"].to_numpy() + steps["first_tokens"].to_numpy())
    late = tokens > (1 - LATE) * tokens[-1] if len(tokens) else np.zeros(0, dtype=bool)
    late_tokens = tokens[-1] - (tokens[~late][-1] if (~late).any() else 0) if len(tokens) else 0
    wall_s = float(steps["end_s"].iloc[-1]) if len(steps) else 0.0
    trainer_s = float(each["gpu_s"].sum())
    return {
        "wall_s": wall_s,
        "tokens": float(tokens[-1]) if len(tokens) else 0.0,
        "serving_gpu_s": float(seconds.sum() + loaded["seconds"].sum() - each["taken_s"].sum()),
        "late_serving_us_per_token": 1e6 * seconds[late].sum() / late_tokens if late_tokens else nan,
        "trainer_gpu_s": trainer_s,
        "trainer_taken_s": float(each["taken_s"].sum()),
        "trainer_reserved_s": max(float(each["gpus"].iloc[0]) * wall_s, trainer_s),
        "versions_loaded": float(loaded["draft_version"].nunique()),
        "rollbacks": float((records.events["kind"] == "rollback").sum()),
    }


def _alarms(events: "pd.DataFrame") -> dict[str, float]:
    """Alarms and how long they took: after each drift, the first one before the next drift counts."""
    alarms, drifts = events[events["kind"] == "alarm"], events[events["kind"] == "drift"]
    delays_s, delays, missed = [], [], 0
    ends = [*drifts["time_s"].iloc[1:].tolist(), inf][: len(drifts)]
    for start_s, end_s, finished in zip(drifts["time_s"], ends, drifts["finished"], strict=True):
        after = alarms[(alarms["time_s"] > start_s) & (alarms["time_s"] <= end_s)]
        if after.empty:
            missed += 1
        else:
            delays_s.append(after["time_s"].iloc[0] - start_s)
            delays.append(after["finished"].iloc[0] - finished)
    first_s = drifts["time_s"].iloc[0] if len(drifts) else inf
    return {
        "alarms": float(len(alarms)),
        "alarms_before_drift": float((alarms["time_s"] <= first_s).sum()),
        "drifts": float(len(drifts)),
        "drifts_missed": float(missed),
        "alarm_delay_s": float(np.mean(delays_s)) if delays_s else nan,
        "alarm_delay_requests": float(np.mean(delays)) if delays else nan,
    }


def timeline(
    requests: "pd.DataFrame", policy: str, place: str, events: "pd.DataFrame", blocks: "pd.DataFrame"
) -> Timeline:
    """tau of finished requests by domain in bins of time: decoded tokens / rounds, pooled."""
    import pandas as pd

    done = requests[requests["finish_s"].notna() & (requests["rounds"] > 0)]
    bins = int(np.clip(len(done) // (2 * FEW), 1, BINS))
    edges = np.linspace(0, done["finish_s"].max() if len(done) else 1.0, bins + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    rows = []
    for domain in ["", *sorted(done["domain"].unique())]:
        part = done if domain == "" else done[done["domain"] == domain]
        at = np.searchsorted(edges, part["finish_s"].to_numpy(), side="left").clip(1) - 1
        tokens = np.bincount(at, weights=part["tokens"] - 1, minlength=bins)
        rounds = np.bincount(at, weights=part["rounds"], minlength=bins)
        shown = np.bincount(at, minlength=bins) >= FEW
        taus = np.divide(tokens, rounds, out=np.full(bins, nan), where=shown)
        rows += [(domain, middle[i], taus[i]) for i in range(bins)]
    tau = pd.DataFrame(rows, columns=["domain", "time_s", "tau"])
    return Timeline(policy, place, tau, events, by_version(blocks))


def by_version(blocks: "pd.DataFrame") -> "pd.DataFrame":
    """tau of each drafter version in each domain, at the lengths that were verified; see :class:`Timeline`."""
    tokens = (blocks["accepted"] + 1) * blocks["blocks"]
    sums = blocks.assign(tokens=tokens).groupby(["domain", "draft_version"], as_index=False)[["blocks", "tokens"]].sum()
    return sums.assign(rounds=sums["blocks"], tau=sums["tokens"] / sums["blocks"])[
        ["domain", "draft_version", "rounds", "tau"]
    ]


def payback(frozen_s_per_token: float, serving_s: float, tokens: float, trainer_s: float) -> float:
    """Serving GPU-seconds saved per GPU-second of training, for ``tokens`` tokens; 1 = paid back, negative = a loss."""
    saved_s = frozen_s_per_token * tokens - serving_s
    return saved_s / trainer_s if trainer_s else nan


def repaid_after_s(saved_s: float, trainer_s: float, late_saving: float) -> float:
    """Seconds of further serving, with no further training, until training is paid back; 0 = it is, inf = never.

    Args:
        saved_s: serving GPU-seconds saved so far.
        trainer_s: GPU-seconds of training so far.
        late_saving: serving GPU-seconds saved per second at the end of the run.
    """
    if saved_s >= trainer_s:
        return 0.0
    if isnan(saved_s) or isnan(late_saving):
        return nan
    return (trainer_s - saved_s) / late_saving if late_saving > 0 else inf


def paybacks(trials: "pd.DataFrame", point: list[str], *, open_loop: bool) -> "pd.DataFrame":
    """Every learning run against the one with a frozen drafter at the same point, policy and seed.

    Columns: policy, the point, seed; ``throughput`` and ``tpot`` over those of the frozen drafter; ``trainer_share`` and
    ``reserved_share`` GPU-seconds of training, and GPU-seconds for which trainer GPUs were held, per serving GPU-second;
    ``payback`` and ``payback_reserved``, see :func:`payback`; ``late_saving`` the share of serving GPU-seconds saved at
    the end of the run; ``engines`` that must share one trainer for that saving to pay for the GPUs it holds;
    ``repaid_after_s``, see :func:`repaid_after_s`. Where training took time from steps, the last three are NaN (what it
    took is in the end's seconds too), and in open loops ``payback`` as well: a slower engine batches more, and what
    that saves is not training's.

    Empty where no loss was swept with "frozen" among its values.
    """
    import pandas as pd

    swept = [p for p in point if p.endswith("learning.loss")]
    if not swept or "serving_gpu_s" not in trials or "frozen" not in set(trials[swept[0]]):
        return pd.DataFrame()
    loss = swept[0]
    keys = ["policy", "seed", *(p for p in point if p != loss)]
    values = ["output_tok_s", "tpot_p50_ms", "tokens", "serving_gpu_s", "late_serving_us_per_token"]
    frozen = trials[trials[loss] == "frozen"][keys + values]
    both = trials[trials[loss] != "frozen"].merge(frozen, on=keys, suffixes=("", "_frozen"))
    rows = []
    for _, r in both.iterrows():
        frozen_s = nan if open_loop and r["trainer_taken_s"] else r["serving_gpu_s_frozen"] / r["tokens_frozen"]
        saved_s = frozen_s * r["tokens"] - r["serving_gpu_s"]
        late = nan if r["trainer_taken_s"] else r["late_serving_us_per_token"]
        saving = (r["late_serving_us_per_token_frozen"] - late) / r["late_serving_us_per_token_frozen"]
        saved_per_s = 1e-6 * (r["late_serving_us_per_token_frozen"] - late) * r["tokens"] / r["wall_s"]
        held = r["trainer_reserved_s"] / r["serving_gpu_s"]
        rows.append(
            {k: r[k] for k in [*keys, loss]}
            | {
                "throughput": r["output_tok_s"] / r["output_tok_s_frozen"] - 1,
                "tpot": r["tpot_p50_ms"] / r["tpot_p50_ms_frozen"] - 1,
                "trainer_share": r["trainer_gpu_s"] / r["serving_gpu_s"],
                "reserved_share": held,
                "payback": payback(frozen_s, r["serving_gpu_s"], r["tokens"], r["trainer_gpu_s"]),
                "payback_reserved": payback(frozen_s, r["serving_gpu_s"], r["tokens"], r["trainer_reserved_s"]),
                "late_saving": saving,
                "engines": nan if isnan(saving) else held / saving if saving > 0 else inf,
                "repaid_after_s": repaid_after_s(saved_s, r["trainer_gpu_s"], saved_per_s),
            }
        )
    return pd.DataFrame(rows)
