"""Trials that one real engine serves in turns of seconds: what slows the machine down slows all of them alike."""

import time
from collections.abc import Sequence
from pathlib import Path

from adasim.experiment import Failure, failure, run_trial, trial_folder, write_results
from adasim.plan import Trial
from adasim.real.engine_backend import EngineBackend
from adasim.real.turns import Turns
from adasim.records import Records
from adasim.scenario import Scenario

TURN_S = 0.5  # a run's first step after another's may find caches cold: it should be one of several


def take_turns(trials: Sequence[Trial]) -> bool:
    """Whether all of them can stop between steps."""
    return all(
        isinstance(s.backend, EngineBackend) and s.backend.takes_turns(s.workload) for s in map(Trial.scenario, trials)
    )


def run_in_turns(trials: Sequence[Trial], out: Path) -> list[Failure | None]:
    """Run trials in turns, or one after another where they cannot, and write their folders.

    The trial with the smallest share of its work done takes the next turn, and nobody a second before all had a first, so
    that all of them begin and end together and each meets the same moments of the machine. Returns what went wrong with
    each; one that fails leaves the others.
    """
    if len(trials) < 2 or not take_turns(trials):
        return [run_trial(t, out) for t in trials]
    scenarios = [t.scenario() for t in trials]
    began_s = time.time()
    made, failed = _play(trials, scenarios, out)
    wall_s = began_s, time.time()
    for i, records in made.items():
        try:
            with trial_folder(trials[i], out) as folder:
                write_results(trials[i], scenarios[i], records, wall_s, folder, trace=False)
        except Exception as error:  # as with trials that run alone, the caller reports it
            failed[i] = failure(trials[i], error, out)
    return [failed.get(i) for i in range(len(trials))]


def _play(
    trials: Sequence[Trial], scenarios: Sequence[Scenario], out: Path
) -> tuple[dict[int, Records], dict[int, Failure]]:
    """Records of the runs that came to their end, and what became of the others."""
    runs = dict[int, Turns[Records]]()
    for i, (trial, scenario) in enumerate(zip(trials, scenarios, strict=True)):
        assert isinstance(scenario.backend, EngineBackend)
        runs[i] = scenario.backend.turns(scenario.workload, scenario.policies[0], trial.seed)
    shares, made, failed = dict.fromkeys(runs, -1.0), dict[int, Records](), dict[int, Failure]()
    try:
        while shares:
            i = min(shares, key=lambda i: shares[i])
            try:
                until_s = time.monotonic() + TURN_S
                shares[i] = next(runs[i])
                while time.monotonic() < until_s:
                    shares[i] = next(runs[i])
            except StopIteration as end:
                made[i] = end.value
                del shares[i]
            except Exception as error:
                failed[i] = failure(trials[i], error, out)
                del shares[i]
    finally:
        for run in runs.values():
            run.close()
    return made, failed
