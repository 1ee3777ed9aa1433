"""Survival of drafts from blocks that were cut blindly."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from adasim.types import FloatArray


def survival_of(rounds: pd.DataFrame, depth: int, prior: Mapping[str, FloatArray] | None = None) -> dict[str, FloatArray]:
    """Survival by domain by the product-limit estimator (Kaplan and Meier 1958), [K] each.

    A block verified to v says nothing of drafts beyond. Where none reached, the conditional acceptance of ``prior`` goes
    on, or without one that of the last position known. A policy that cuts blocks by what it sees of them cuts
    informatively: give rounds that were cut blindly.

    Args:
        rounds: ``RoundRecord`` columns, or those of ``BlockRecord``, whose ``blocks`` count.
        depth: K.
        prior: survival by domain, [K] each; domains without rounds are left out all the same.
    """
    found: dict[str, FloatArray] = {}
    for domain, mine in rounds[rounds["verify_len"] > 1].groupby("domain"):
        verified, accepted = mine["verify_len"].to_numpy()[:, None], mine["accepted"].to_numpy()[:, None]
        count = mine["blocks"].to_numpy(dtype=float) if "blocks" in mine else np.ones(len(mine))
        d = np.arange(1, depth + 1)
        at_risk = (accepted >= d - 1) & (verified > d)
        reached, survived = count @ at_risk, count @ (at_risk & (accepted >= d))
        rates = np.divide(survived, reached, out=np.full(depth, np.nan), where=reached > 0)
        curve = (prior or {}).get(str(domain))
        if curve is not None:
            before = np.concatenate([[1.0], curve[:-1]])
            rates = np.where(reached > 0, rates, np.divide(curve, before, out=np.zeros(depth), where=before > 0))
        found[str(domain)] = np.cumprod(pd.Series(rates).ffill().to_numpy(), dtype=np.float64)
    return found
