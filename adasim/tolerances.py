"""How far off a prediction may be before ``adasim validate`` fails."""

from pydantic import Field

from adasim.types import Component


class Tolerances(Component):
    """Limits over cells that were not used for fitting; errors are relative, of means over repeats.

    Throughput and TPOT are divided by plain decoding measured within minutes, so that a machine whose speed drifts does
    not count as an error of the model.

    Attributes:
        throughput_mae: mean absolute error of throughput over plain decoding.
        repeat_factor: that limit is at least so many times the error of a cell's mean by its repeats' scatter about the
            prediction.
        throughput_worst: absolute error of the worst cell.
        tau: mean absolute error.
        tpot_p50: mean absolute error of the median TPOT over plain decoding's.
        tpot_p95: the same of its 95th percentile.
        ranking: policies must be in the measured order wherever the measured gap exceeds noise.
        crossover_steps: grid steps by which the load may be off at which a policy stops paying.
    """

    throughput_mae: float = Field(default=0.06, gt=0)
    repeat_factor: float = Field(default=1.5, ge=0)
    throughput_worst: float = Field(default=0.15, gt=0)
    tau: float = Field(default=0.03, gt=0)
    tpot_p50: float = Field(default=0.08, gt=0)
    tpot_p95: float = Field(default=0.15, gt=0)
    ranking: bool = True
    crossover_steps: int = Field(default=1, ge=0)


class Validation(Component):
    """What ``adasim validate`` does with a scenario.

    Attributes:
        tolerances: what it may miss by.
        replications: simulated runs of each measured one, each with luck of its own.
        reference_age_s: how far in time a run and its plain-decoding reference may lie apart; further: it is not judged.
        pair: policies' runs beside one reference, or between two. On SGLang without a GPU each needs memory for a server.
        false_alarm_runs: mean runs between false alarms of one cost that ``--watch`` watches.
        false_alarm_requests: mean requests between false alarms of one domain's acceptance.
    """

    tolerances: Tolerances = Tolerances()
    replications: int = Field(default=3, ge=2, le=100)
    reference_age_s: float = Field(default=300.0, gt=0)
    pair: int = Field(default=2, ge=1, le=100)
    false_alarm_runs: float = Field(default=1000.0, ge=10)
    false_alarm_requests: float = Field(default=5000.0, ge=10)
