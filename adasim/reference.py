"""Published or measured numbers that a scenario's predictions are held against."""

from typing import Literal, Self

import pandas as pd
from pydantic import Field, PrivateAttr, model_validator

from adasim.errors import InputError
from adasim.files import Columns, find, read_columns
from adasim.types import Component

Role = Literal["input", "predicted"]


class Reference(Component):
    """Reference cells and the error that is tolerated.

    The CSV has the columns ``policy`` (a label), ``at`` (value of the swept ``field``), ``value``, and
    ``role``: ``input`` cells were used to fit the model and do not count, ``predicted`` ones do.

    Attributes:
        source: who published or measured them.
        metric: what they are; ``speedup`` is over the policy ``off``.
        mean_abs_error: tolerated mean of |predicted / reference - 1| over the predicted cells.
        max_abs_error: tolerated worst cell.
        side_margin: speed-ups must fall on the reference's side of 1, unless the reference is this close to it.
    """

    source: str
    file: str
    field: str = "workload.concurrency"
    metric: Literal["speedup", "output_tok_s", "tau", "tpot_p50_ms", "ttft_p50_ms"] = "speedup"
    mean_abs_error: float = Field(gt=0)
    max_abs_error: float = Field(gt=0)
    side_margin: float | None = Field(default=None, ge=0)
    _cells: pd.DataFrame = PrivateAttr()

    @model_validator(mode="after")
    def _read(self) -> Self:
        path = find(self.file, "file")
        names = ("policy", "at", "value", "role")
        table = read_columns(path, Columns(names, ("note",), positive=("at", "value")))
        wrong = sorted(set(table["role"]) - {"input", "predicted"})
        if wrong:
            raise InputError(f"{path}: role {', '.join(map(str, wrong))}; allowed: input, predicted")
        self._cells = table[list(names)]
        return self

    @property
    def cells(self) -> pd.DataFrame:
        """Columns policy, at, value, role."""
        return self._cells
