"""Published or measured numbers that a scenario's predictions are held against."""

from math import nan
from typing import Literal, Self, get_args

import pandas as pd
from pydantic import Field, PrivateAttr, model_validator

from adasim.errors import InputError
from adasim.files import Columns, find, read_columns
from adasim.types import Component

Role = Literal["input", "predicted", "extrapolated"]


class Reference(Component):
    """Reference cells and the error that is tolerated.

    The CSV has the columns ``policy`` (a label), ``at`` (value of the swept ``field``), ``value``, and
    ``role``: ``input`` cells were used to fit the model and do not count, ``predicted`` ones do, and so do
    ``extrapolated`` ones, which lie beyond what the model was fitted on and are marked. A column ``null`` may hold what
    a model without the mechanism under test predicts; ``null_model`` says which.

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
    null_model: str | None = None
    _cells: pd.DataFrame = PrivateAttr()

    @model_validator(mode="after")
    def _read(self) -> Self:
        path = find(self.file, "file")
        names = ("policy", "at", "value", "role")
        table = read_columns(path, Columns(names, ("null", "note"), positive=("at", "value")))
        wrong = sorted(set(table["role"]) - set(get_args(Role)))
        if wrong:
            raise InputError(f"{path}: role {', '.join(map(str, wrong))}; allowed: {', '.join(get_args(Role))}")
        if ("null" in table) != (self.null_model is not None):
            raise InputError(f"{path}: a column null and reference.null_model go together")
        if "null" in table and not (pd.to_numeric(table["null"].dropna(), errors="coerce") > 0).all():
            raise InputError(f"{path}: null holds numbers > 0, or nothing")
        self._cells = table[list(names)].assign(null=table.get("null", nan))
        return self

    @property
    def cells(self) -> pd.DataFrame:
        """Columns policy, at, value, role, null (NaN: no null prediction)."""
        return self._cells
