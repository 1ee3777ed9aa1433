"""What backends that run a real engine share, whichever it is. Loads no torch."""

from abc import abstractmethod

from pydantic import PrivateAttr

from adasim.calibration.cost import CostModel
from adasim.calibration.profile import Profile
from adasim.policies.base import Policy
from adasim.policies.driver import PolicyDriver
from adasim.real.opd import Opd
from adasim.real.sampling import Forced
from adasim.real.turns import Turns
from adasim.records import Records
from adasim.types import Component, EngineCaps
from adasim.workload import Workload


class EngineBackend(Component):
    """Measures: nothing is modelled, and what policies may know of time is told to them."""

    _believed: CostModel | None = PrivateAttr(default=None)

    def _believe(self, cost: CostModel | None, profile: str | None) -> list[str]:
        """Take the cost that policies may know from a field or from a profile; problems where both are given."""
        if profile is not None and cost is not None:
            return ["give cost or profile, not both"]
        self._believed = cost if profile is None else Profile.load(profile).cost
        return []

    @staticmethod
    def _untaught(opd: Opd | None, forced: Forced | None) -> list[str]:
        """Why nothing can be learned from what is served; empty = it can, or nobody wants to."""
        if opd is not None and forced is not None:
            return ["opd and forced exclude each other: forced text teaches nothing"]
        return []

    @property
    def mark(self) -> str:
        """How a report marks numbers of this backend."""
        return "measured"

    @property
    def calibration(self) -> None:
        """A real engine needs none."""
        return None

    @property
    def inputs(self) -> dict[str, Component]:
        """No model decides the outcome: all is measured. A cost model only informs policies."""
        return {} if self._believed is None else {"cost": self._believed}

    def takes_turns(self, workload: Workload) -> bool:
        """Whether runs of this workload can stop between steps."""
        return False

    def turns(self, workload: Workload, policy: Policy, seed: int) -> Turns[Records]:
        """Serve one run that stops after every step, where :meth:`takes_turns` says so.

        Its clock stands still while it is stopped.
        """
        raise NotImplementedError

    @abstractmethod
    def caps(self) -> EngineCaps:
        """The engine's limits and what it provides."""

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that needs what this engine lacks.

        Raises:
            InputError: what is missing, or which field does not fit.
        """
        PolicyDriver(policy, self.caps())
