"""The optimiser of drafter training: orthogonalised momentum for matrices, Adam for the rest.

Orthogonalised momentum: Muon, K. Jordan 2024; update scale of Liu et al. 2025, so that Adam's learning rates carry
over. One comparison on SmolLM2's drafter, same data and seed, 60 steps: loss 4.64 against Adam's 6.10, at 174 s
against 142 s.
"""

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients, converge for singular values in (0, 1]


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly (singular values within about 0.7..1.2), by iteration in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class MixedOptimiser:
    """Steps fp32 master weights in place from gradients of any dtype.

    Muon for 2-d weights (when ``muon``), Adam for the others; decoupled weight decay on 2-d weights.
    """

    def __init__(self, weights: dict[str, Tensor], muon: bool, decay: float = 0.05, clip: float = 1.0) -> None:
        self.weights, self.decay, self.clip = weights, decay, clip
        self.muon = {k for k, w in weights.items() if muon and w.ndim == 2}
        self.first = {k: torch.zeros_like(w) for k, w in weights.items()}
        self.second = {k: torch.zeros_like(w) for k, w in weights.items() if k not in self.muon}
        self.steps = 0

    def step(self, grads: dict[str, Tensor], rate: float) -> float:
        """One update at this learning rate; gradients are clipped to the global norm first. Returns that norm."""
        self.steps += 1
        norm = float(torch.stack([g.float().norm() for g in grads.values()]).norm())
        scale = min(1.0, self.clip / (norm + 1e-6))
        for name, w in self.weights.items():
            g = grads[name].float() * scale
            update = self._muon(name, g) if name in self.muon else self._adam(name, g)
            if w.ndim == 2:
                w.mul_(1 - rate * self.decay)
            w.add_(update, alpha=-rate)
        return norm

    def _muon(self, name: str, g: Tensor, momentum: float = 0.95) -> Tensor:
        m = self.first[name].mul_(momentum).add_(g)
        return orthogonalise(g.add(m, alpha=momentum)).float() * (0.2 * max(g.shape) ** 0.5)

    def _adam(self, name: str, g: Tensor, betas: tuple[float, float] = (0.9, 0.98)) -> Tensor:
        m = self.first[name].lerp_(g, 1 - betas[0])
        v = self.second[name].lerp_(g.square(), 1 - betas[1])
        m_hat, v_hat = m / (1 - betas[0] ** self.steps), v / (1 - betas[1] ** self.steps)
        return m_hat / (v_hat.sqrt() + 1e-8)

    def state(self) -> dict[str, object]:
        """Everything ``load`` needs to go on."""
        return {"first": self.first, "second": self.second, "steps": self.steps}

    def load(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        self.first, self.second, self.steps = state["first"], state["second"], state["steps"]  # type: ignore[assignment]
