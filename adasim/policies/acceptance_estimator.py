"""Acceptance from the drafter's own margins, learnt while serving."""

import numpy as np

from adasim.types import FloatArray, StepOutcome

BINS = 128
REACH = 32.0  # margins are binned within -REACH..REACH
RIDGE = 10.0  # how firmly a refit holds on to the fit before it


class AcceptanceEstimator:
    """p_k = sigmoid(w margin_k + b_k), one slope for all positions and an intercept for each, by logistic regression.

    One slope, because deep positions see too little to fit two numbers. Observations are counted in bins of margin, 0.5
    wide, so that a refit costs the same however many there were; it starts from the last fit and is held to it where it
    saw little.

    **Censoring.** Draft k of a round counts only if it was decided on: all before it were accepted and it was
    verified itself (k <= accepted + 1 and k <= verified drafts). Taking every draft after the first refusal for a
    refusal would teach survival instead of conditional acceptance; taking unverified ones for refusals would shrink
    the very positions that the rule had cut.

    Args:
        max_draft_len: positions K.
        memory: what a refit leaves of the counts before it, 0..1.
    """

    def __init__(self, max_draft_len: int, memory: float) -> None:
        self.slope, self.intercepts = 1.0, np.zeros(max_draft_len)
        self._memory = memory
        self._count = np.zeros((3, max_draft_len, BINS))  # decided on, accepted, sum of margins

    def survival(self, margin: FloatArray) -> FloatArray:
        """P(first k drafts accepted), [n, K], from margins [n, K]."""
        from scipy.special import expit  # slow to import, not always needed

        return np.cumprod(expit(self.slope * margin + self.intercepts), axis=1, dtype=np.float64)

    def observe(self, margin: FloatArray, outcome: StepOutcome) -> None:
        """Count the drafts that this round decided on. ``margin``: [n, K] as it was then."""
        positions = np.arange(margin.shape[1])
        accepted, drafts = outcome.accepted[:, None], outcome.verify_lens[:, None] - 1
        rows, at = np.nonzero((positions <= accepted) & (positions < drafts))
        values = margin[rows, at].clip(-REACH, REACH)
        good = at < outcome.accepted[rows]
        cell = at * BINS + ((values + REACH) * (BINS / (2 * REACH))).astype(np.int64).clip(max=BINS - 1)
        size = self._count[0].size
        seen = [np.bincount(cell, weights, minlength=size) for weights in (None, good, values)]
        self._count += np.reshape(seen, self._count.shape)

    def refit(self, rounds: int = 30) -> None:
        """Newton's method, steps halved until they help, from the present fit; then forget part of the counts."""
        from scipy.special import expit  # slow to import, not always needed

        decided, accepted, total = self._count
        cells = np.nonzero(decided)
        n, y, m, at = decided[cells], accepted[cells], total[cells] / decided[cells], cells[0]
        old_slope, old_intercepts = self.slope, self.intercepts

        def loss(slope: float, intercepts: FloatArray) -> float:
            """Penalised negative log-likelihood."""
            log_odds, moved = slope * m + intercepts[at], intercepts - old_intercepts
            penalty = RIDGE / 2 * ((slope - old_slope) ** 2 + float(moved @ moved))
            return float(n @ np.logaddexp(0, log_odds) - y @ log_odds) + penalty

        def newton() -> tuple[float, FloatArray]:
            """The full step. The Hessian is an arrow: one slope against independent intercepts."""
            p = expit(self.slope * m + self.intercepts[at])
            residual, curvature = y - n * p, n * p * (1 - p)
            d = by_position(curvature) + RIDGE
            c = by_position(curvature * m)
            g = by_position(residual) - RIDGE * (self.intercepts - old_intercepts)
            g_slope = float(residual @ m) - RIDGE * (self.slope - old_slope)
            h_slope = float(curvature @ m**2) + RIDGE
            step = (g_slope - float(c @ (g / d))) / (h_slope - float(c @ (c / d)))
            return step, (g - c * step) / d

        def by_position(values: FloatArray) -> FloatArray:
            return np.bincount(at, values, minlength=len(old_intercepts)).astype(float)

        now = loss(self.slope, self.intercepts)
        for _ in range(rounds):
            step, steps = newton()
            for share in 0.5 ** np.arange(10):
                slope, intercepts = self.slope + share * step, self.intercepts + share * steps
                then = loss(slope, intercepts)
                if then <= now:
                    break
            else:
                break
            self.slope, self.intercepts = slope, intercepts
            if now - then < 1e-9 * now:
                break
            now = then
        self._count *= self._memory
