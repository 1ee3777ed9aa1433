"""What an engine can know beforehand of how long an answer will be."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from adasim.calibration.acceptance import request_rng
from adasim.types import Component, FloatArray, Request


class LengthPredictor(Component):
    """Guesses each request's output tokens once, when it arrives: the true length x exp(``log_sd`` * N(0, 1)).

    ``log_sd`` has no default: 0 is the truth, which no predictor knows; 0.7 is off by a factor of two either way for
    every third request. The guess belongs to the request: every policy and scheduler gets the same.
    """

    log_sd: float = Field(ge=0, le=5)

    def predict(self, requests: Sequence[Request], seed: int) -> FloatArray:
        """Guessed output tokens, [requests]."""
        noise = np.array([request_rng(seed, r.id, 3).standard_normal() for r in requests])
        return np.array([r.output_len for r in requests]) * np.exp(self.log_sd * noise)
