"""A cost model on the GPUs that a scenario asks for, or a refusal."""

from adasim.calibration.adjust import Adjust, ScaledCost
from adasim.calibration.cost import CostModel, TableCost
from adasim.calibration.formula import FormulaCost
from adasim.calibration.parallel import Parallel, Split
from adasim.calibration.pass_cost import PassCost
from adasim.calibration.roofline import RooflineCost
from adasim.errors import InputError


def cost_on(cost: CostModel, parallel: Parallel | None) -> CostModel:
    """The cost on these GPUs; null: as it stands, on one attention rank.

    A roofline computes what parallelism does. Times that were measured hold where they were measured; elsewhere only by
    factors that somebody gives (``parallel.assume``), which the report then calls an assumption.

    Raises:
        InputError: the model cannot be divided like that, times were measured elsewhere and no factors are given, or a
            field has no effect.
    """
    if parallel is None:
        if isinstance(cost, TableCost | FormulaCost | PassCost) and cost.measured_on and cost.measured_on.dp > 1:
            raise InputError(f"parallel: the cost was measured on attention ranks; say so here ({cost.measured_on})")
        return cost
    if isinstance(cost, RooflineCost):
        return cost.on(parallel)
    assert isinstance(cost, TableCost | FormulaCost | PassCost)
    measured = cost.measured_on
    if idle := [name for name in ("collective_us", "link_gb_s") if getattr(parallel, name) != getattr(Parallel(), name)]:
        raise InputError(f"parallel.{idle[0]} has no effect: measured times hold their communication")
    if measured is None:
        raise InputError(
            f"cost.measured_on: say under which tp and dp the times were measured; backend.parallel asks for {parallel}"
        )
    if (measured.tp, measured.dp) == (parallel.tp, parallel.dp):
        if parallel.assume is not None:
            raise InputError(f"parallel.assume has no effect: the cost was measured under {parallel}")
        return cost
    if parallel.assume is None:
        raise InputError(
            f"parallel: the cost was measured under tp {measured.tp}, dp {measured.dp}, not {parallel}; measure there "
            "or give factors for its times as parallel.assume: {verify: ..., draft: ..., prefill: ...}"
        )
    return AssumedCost.scaled(cost, parallel, measured)


class AssumedCost(ScaledCost):
    """Measured times carried over to other GPUs by factors somebody gave."""

    _note: str = ""

    @classmethod
    def scaled(cls, cost: CostModel, parallel: Parallel, measured: Split) -> "AssumedCost":
        """``cost`` times ``parallel.assume``."""
        assert parallel.assume is not None
        factors = parallel.assume.model_dump()
        model = cls.of(cost, Adjust(**factors))
        said = ", ".join(f"{name} {factor:g}" for name, factor in factors.items())
        model._note = (
            f"assumed: times under {parallel} are those measured under tp {measured.tp}, dp {measured.dp}, times {said}"
        )
        return model

    @property
    def notes(self) -> list[str]:
        """What the model itself says, and what was assumed."""
        return [*super().notes, self._note]
