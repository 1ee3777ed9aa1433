"""On-policy distillation: its settings. A drafter learns from what the target showed while serving.

Importing this loads no torch. The trainer is ``train_opd``, its process ``opd_process``, the serving side ``distiller``.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from adasim.calibration.rollback import Rollback
from adasim.errors import InputError
from adasim.real.losses import AnyLoss, ClippedReverseKl
from adasim.types import Component

Positions = Literal["accepted", "all", "text"]
Label = Literal["full", "accepted/verified", "emitted/verified", "accepted/predicted"]


class Opd(Component):
    """Settings of on-policy distillation. Defaults: AdaFlash's (arXiv 2607.19223), unless stated.

    Attributes:
        enabled: false = serve as if this were not here; for comparing with and without.
        buffer: finished requests that start a training round.
        max_tokens: prompt and output kept of one request.
        positions: of each round's block that are trained. "accepted" = 1..L+1 (default here), where the target saw
            exactly the context the drafter assumed; "all" = every verified position (the paper's literal reading:
            beyond L+1 the target was conditioned on rejected drafts that the drafter cannot see); "text" = the whole
            block along the text that followed.
        accumulate: requests an optimiser step.
        blocks: rounds of a request in one batch at most, drawn at random (ours: bounds a step's cost).
        head_label: what the length head learns. "full" from blocks verified whole; the others, from cut blocks, are
            censored (see ``length_head.label``).
        full_verify_share: rounds that verify their whole block so that the head sees where acceptance ends.
        teacher: "rerun" labels ``rerun_blocks`` more full blocks of each request in the trainer, by running the
            target over drafts of the drafter being trained; costs trainer time.
        rollback: when a version is judged against the one before, and goes; null = never.
        cores: CPUs the trainer may use; null = any.
        hang_s: a trainer that shows no life for so long is stopped.
        keep: folder that keeps the versions of each run; null = they are discarded at its end.
    """

    enabled: bool = True
    loss: AnyLoss = ClippedReverseKl()
    buffer: int = Field(default=128, ge=1)
    max_tokens: int = Field(default=2048, ge=16)
    positions: Positions = "accepted"
    epochs: int = Field(default=2, ge=1)
    accumulate: int = Field(default=2, ge=1)
    rate: float = Field(default=3e-4, gt=0)
    head_rate: float = Field(default=2e-4, gt=0)
    blocks: int = Field(default=64, ge=1)
    head_label: Label = "full"
    full_verify_share: float = Field(default=0.05, ge=0, le=1)
    teacher: Literal["none", "rerun"] = "none"
    rerun_blocks: int = Field(default=4, ge=1)
    rollback: Rollback | None = Rollback()
    seed: int = 0
    threads: int = Field(default=1, ge=1)
    cores: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    device: Literal["cpu", "cuda", "cuda:1"] = "cpu"
    hang_s: float = Field(default=300.0, gt=0)
    keep: str | None = None

    @contextmanager
    def run_folder(self, run: str) -> Iterator[Path]:
        """An empty folder for the trainer of a run of that name: under ``keep``, or one that goes in the end.

        Raises:
            InputError: that run was kept already.
        """
        if self.keep is None:
            with tempfile.TemporaryDirectory(prefix="adasim-opd-") as scratch:
                yield Path(scratch)
            return
        root = Path(self.keep).expanduser().resolve() / re.sub(r"[^\w.=-]+", "-", run)
        if root.exists():
            raise InputError(f"backend.opd.keep: {root} exists; use another folder")
        yield root
