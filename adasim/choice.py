"""Is the policy that the prediction would choose the right one? Regret in published numbers."""

from dataclasses import dataclass

import pandas as pd

HIGHER_IS_BETTER = ("speedup", "output_tok_s", "tau")


@dataclass(frozen=True, slots=True)
class Constant:
    """The policy that does best when the same one is used everywhere."""

    policy: str
    mean_regret: float


def choices(reference: pd.DataFrame) -> pd.DataFrame:
    """Per point: the policy with the best prediction, the one with the best published value, and the regret.

    Columns: at, chosen, best, regret (1 - published value of the chosen / of the best). Points with fewer than two
    policies that are both published and predicted are left out.

    Args:
        reference: as :func:`~adasim.tables.compare` gives it, of a metric where more is better.
    """
    rows = []
    for at, part in reference.dropna(subset=["predicted", "reference"]).groupby("at", sort=True):
        if len(part) < 2:
            continue
        chosen = part.iloc[int(part["predicted"].argmax())]
        best = part.iloc[int(part["reference"].argmax())]
        regret = 1 - chosen["reference"] / best["reference"]
        rows.append({"at": at, "chosen": chosen["policy"], "best": best["policy"], "regret": regret})
    return pd.DataFrame(rows, columns=["at", "chosen", "best", "regret"])


def best_constant(reference: pd.DataFrame) -> Constant | None:
    """The best choice that does not look at the point, among policies published at every point; None: there is none."""
    values = reference.pivot_table(index="policy", columns="at", values="reference")
    regret = 1 - values / values.max()
    means = regret.dropna().mean(axis=1)
    return Constant(str(means.idxmin()), float(means.min())) if len(means) else None
