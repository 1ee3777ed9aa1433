"""Draws from the posterior of a least-squares problem by randomized maximum likelihood.

Every draw is a fit of its own: to measurements moved by their noise, pulled towards a point drawn from what is believed
(Kitanidis, 1995; Oliver, He and Reynolds, 1996). Exact for linear models; for others it still finds all ways in which
terms can stand in for one another, on which chains of small steps get stuck: a posterior of sums of positive terms is
thin, and turns corners.
"""

from collections.abc import Callable

import numpy as np

from adasim.types import FloatArray, IntArray

Model = Callable[[FloatArray], FloatArray]  # [n, p] -> [n, m]
ITERATIONS = 60
STEP = 1e-5  # of a numerical derivative
ENOUGH = 1e-7  # relative fall of the cost
LEAST, MOST = 1e-6, 1e8  # damping


def fits(
    model: Model, pulled_to: FloatArray, goal: FloatArray, noise: FloatArray, start: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Minima of |z - pulled_to|^2 + |(model(z) - goal) / noise|^2, and these values: [n, p] and [n].

    Args:
        model: vectorised over problems.
        pulled_to: where each problem is drawn to, [n, p].
        goal: what the model is to give, [n, m].
        noise: standard deviations, [n, m].
        start: where each problem starts, [n, p]; null = where it is drawn to.
    """

    def residuals(z: FloatArray, of: IntArray) -> FloatArray:
        return np.hstack([z - pulled_to[of], (model(z) - goal[of]) / noise[of]])

    z, n, p = (pulled_to if start is None else start).copy(), *pulled_to.shape
    everyone: IntArray = np.arange(n, dtype=np.int64)
    left = residuals(z, everyone)
    cost = (left**2).sum(axis=1)
    damping = np.full(n, 1e-2)
    active = everyone
    for _ in range(ITERATIONS):  # Levenberg and Marquardt, all problems at once
        aside = (z[active, None] + STEP * np.eye(p)).reshape(-1, p)
        beside = residuals(aside, np.repeat(active, p)).reshape(len(active), p, -1)
        jacobian = (beside - left[active, None]) / STEP  # [n, p, m]
        gradient = np.einsum("npm,nm->np", jacobian, left[active])
        curvature = jacobian @ jacobian.transpose(0, 2, 1) + damping[active, None, None] * np.eye(p)
        moved = z[active] - np.linalg.solve(curvature, gradient[..., None])[..., 0]
        then = residuals(moved, active)
        value = (then**2).sum(axis=1)
        better = value < cost[active]  # false where not a number
        gain = (cost[active] - value) / cost[active]
        chosen = active[better]
        z[chosen], left[chosen], cost[chosen] = moved[better], then[better], value[better]
        damping[active] = np.clip(damping[active] * np.where(better, 0.3, 4.0), LEAST, MOST)
        done = (better & (gain < ENOUGH)) | (damping[active] >= MOST)
        active = active[~done]
        if not len(active):
            break
    return z, cost


def freedom(model: Model, z: FloatArray, noise: FloatArray) -> float:
    """Measurements that the fit does not use up: m less the trace of the hat matrix at one point, [p], with [m] noise."""
    p = len(z)
    at = model(z[None])[0]
    jacobian = (model(z + STEP * np.eye(p)) - at).T / STEP / noise[:, None]
    hat = jacobian @ np.linalg.solve(jacobian.T @ jacobian + np.eye(p), jacobian.T)
    return float(len(noise) - np.trace(hat))
