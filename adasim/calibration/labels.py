"""What a length head is taught: labels of a round, and the lengths that they lead to.

A head that is taught by rounds which it has itself cut short sees censored lengths. All labels here are in tokens
(a label of the papers times the block), the anchor counted as far as the label counts it.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from adasim.types import Component, FloatArray, IntArray

Label = Literal["full_block", "full_verify", "emitted", "accepted", "accepted_of_predicted"]


def labels(kind: Label, run: IntArray, verify_lens: IntArray, block: int) -> FloatArray:
    """Labels of rounds, tokens, [n].

    Args:
        kind: "full_block" L + 1, whatever was verified (the released code scores the whole block in its trainer);
            "full_verify" the same, for rounds that were verified in full; "emitted" accepted + 1; "accepted" the drafts
            accepted; "accepted_of_predicted" accepted / verify_len * block (the paper's wording).
        run: L, [n].
        verify_lens: tokens verified, the anchor counted, [n].
        block: positions of a full block, the anchor counted.
    """
    whole = kind in {"full_block", "full_verify"}
    told = (run if whole else np.minimum(run, verify_lens - 1)).astype(np.float64)
    if kind == "accepted_of_predicted":
        return block * told / verify_lens
    return told if kind == "accepted" else told + 1


def expected_label(kind: Label, survival: FloatArray, verify_len: int) -> float:
    """Mean label, tokens, of rounds that verify ``verify_len`` tokens where full blocks have this survival, [K]."""
    accepted = float(survival[: verify_len - 1].sum())
    if kind in {"full_block", "full_verify"}:
        return 1 + float(survival.sum())
    if kind == "emitted":
        return 1 + accepted
    return accepted if kind == "accepted" else (len(survival) + 1) * accepted / verify_len


def settled_verify_len(kind: Label, survival: FloatArray, start: int) -> float:
    """Mean verify length at which a head that knows nothing but its labels' mean comes to rest.

    It verifies its level, rounded, and its level moves slowly towards the labels' mean. Where that mean lies on either
    side of a rounding edge, it stays at the edge, between two lengths.

    Args:
        kind: its labels.
        survival: of full blocks, [K].
        start: the verify length it begins with.
    """
    block, length = len(survival) + 1, start
    seen: list[int] = []
    while length not in seen:
        seen.append(length)
        label = expected_label(kind, survival, length)
        low, high = length - 0.5, length + 0.5
        length = int(np.clip(length + (label > high) - (label < low), 1, block))
    if length == seen[-1]:
        return float(length)
    lower = min(length, seen[-1])  # two lengths whose labels point at each other: the time in each balances the pull
    up = expected_label(kind, survival, lower) - (lower + 0.5)
    down = lower + 0.5 - expected_label(kind, survival, lower + 1)
    return lower + up / (up + down)


class HeadLearning(Component):
    """How the length head follows a drafter that changes.

    Until it is retrained it keeps the level it had, so that a better drafter meets a head that reports too little.

    Attributes:
        label: what it is taught, see :func:`labels`.
        rounds: training rounds in which its error falls to 1/e (assumed; 0 = at once).
        knows: "text" = the noisy look at L of ``acceptance.head``, at a level that is learned; "domain" = the learned
            level of each domain and nothing else.
        train: false = its level stays as loaded.
        full_verify_share: share of request-rounds verified in full for uncensored labels (only with "full_verify").
    """

    label: Label = "full_block"
    rounds: float = Field(default=5.0, ge=0)
    knows: Literal["text", "domain"] = "text"
    train: bool = True
    full_verify_share: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _used(self) -> Self:
        if (self.full_verify_share > 0) != (self.label == "full_verify"):
            raise ValueError("full_verify_share belongs to label full_verify, and only to it")
        return self

    def level(self, level: float, error: float, rounds: float) -> float:
        """A level that was ``error`` below its labels, after ``rounds`` of training, tokens."""
        if not self.train:
            return level
        return level + error * (1 - np.exp(-rounds / self.rounds) if self.rounds else 1.0)
