"""Who is admitted and who yields: one file a scheduler."""

from typing import Annotated

from pydantic import Field

from adasim.policies.scheduler.base import Scheduler
from adasim.policies.scheduler.ema import EmaAdmission
from adasim.policies.scheduler.fcfs import Fcfs
from adasim.policies.scheduler.packing import VerifyPacking
from adasim.policies.scheduler.shortest import ShortestPredicted
from adasim.policies.scheduler.slo import SloAdmission

AnyScheduler = Annotated[
    Fcfs | EmaAdmission | ShortestPredicted | VerifyPacking | SloAdmission, Field(discriminator="kind")
]

__all__ = ["AnyScheduler", "EmaAdmission", "Fcfs", "Scheduler", "ShortestPredicted", "SloAdmission", "VerifyPacking"]
