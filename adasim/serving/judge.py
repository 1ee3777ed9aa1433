"""Judges drafter versions by the requests that begin under them."""

from adasim.calibration.rollback import Change, Rollback, Served
from adasim.types import IntArray


class Judge:
    """Follows the cohort of the version in use: its first requests, until all have finished.

    Args: rule: when to go back; None = no version is ever judged, or waited for.
    """

    def __init__(self, rule: Rollback | None) -> None:
        self.rule = rule
        self.waiting = False  # for the cohort of the version in use
        self._served: dict[int, Served] = {}
        self._version, self._before = 0, 0
        self._cohort: set[int] = set()
        self._places = 0
        self._seen: set[int] = set()
        self.begin(0, 0)

    def begin(self, version: int, before: int) -> None:
        """A version comes into use; it will be judged against the one ``before`` (itself: not at all)."""
        if self.rule is None:
            return
        self._version, self._before, self._served[version] = version, before, Served()
        self.waiting, self._places, self._cohort = True, self.rule.requests, set()

    def see(self, requests: IntArray) -> None:
        """These requests, [n], have a round: those that are new join the cohort while it has places."""
        if self.rule is None:
            return
        new = [r for r in requests.tolist() if r not in self._seen]
        self._seen.update(new)
        self._cohort.update(new[: self._places])
        self._places -= len(new[: self._places])

    def finish(self, request: int, domain: int, tau: float | None) -> Change | None:
        """A request is done; says by how much the version is worse when it must go.

        Args: tau: its tokens per round; None = it has no round to judge by, and nobody waits for it any longer.
        """
        if request not in self._cohort:
            return None
        self._cohort.remove(request)
        if tau is not None:
            self._served[self._version].add(domain, tau)
        if self._cohort or self._places or self.rule is None:
            return None
        self.waiting = False
        if self._version == self._before:
            return None
        change = self.rule.change(self._served[self._version], self._served[self._before])
        return change if self.rule.is_worse(change) else None
