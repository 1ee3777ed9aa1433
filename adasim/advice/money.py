"""What output tokens cost."""

from typing import NamedTuple

import pandas as pd

HOUR_S = 3600


class Money(NamedTuple):
    """Prices.

    Attributes:
        usd_per_gpu_hour: of every GPU.
        gpus: of one serving engine.
        trainer_gpus: that train the drafter, per engine: 2 shared by four engines are 0.5. Paid by every policy that
            drafts.
    """

    usd_per_gpu_hour: float
    gpus: int = 1
    trainer_gpus: float = 0.0

    def per_million(self, output_tok_s: float, *, drafts: bool) -> float:
        """US dollars per million output tokens; an engine is paid for whether it is busy or not."""
        gpus = self.gpus + (self.trainer_gpus if drafts else 0.0)
        return gpus * self.usd_per_gpu_hour / HOUR_S / output_tok_s * 1e6 if output_tok_s > 0 else float("inf")

    def column(self, summary: pd.DataFrame) -> "pd.Series[float]":
        """The same for every row of a summary."""
        pairs = zip(summary["output_tok_s"], summary["policy"] != "off", strict=True)
        return pd.Series([self.per_million(t, drafts=d) for t, d in pairs], index=summary.index)
