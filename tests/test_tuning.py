"""The search for the best policy: ladders, halving, limits, frontier; on runs whose truth is known."""

import json
from collections import Counter
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim.errors import InputError
from adasim.plan import Plan, Trial
from adasim.search import Tune, add_search, spaced
from adasim.tables import THROUGHPUT
from adasim.tuning import ALIKE, BEST, FAILED, OVER, WORSE, Point, Run, candidates_of, halve, ladder, seeds_of, shortened
from adasim.tuning_report import answer, pareto
from tests.build import adasim, closed, plan

Truth = Callable[[dict[str, Any]], float]  # a policy's fields -> output tokens per second


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("0.8..1.6", [0.8, 1.0, 1.2, 1.4, 1.6]),
        ("1..9", [1, 3, 5, 7, 9]),
        ("2..4", [2, 3, 4]),
        ("2..16..7", [2, 9, 16]),
        ("0.1..0.35..0.1", [0.1, 0.2, 0.3]),
        ("log:0.01..100", [0.01, 0.1, 1.0, 10.0, 100.0]),
        ("-1.0..1.0", [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (["auto", 0.5, "auto"], ["auto", 0.5]),
    ],
)
def test_ranges(spec: str | list[Any], values: list[Any]) -> None:
    found = spaced(spec, 5)
    assert found == pytest.approx(values) if not isinstance(spec, list) else found == values
    assert [type(v) for v in found] == [type(v) for v in values]


@pytest.mark.parametrize("spec", ["0.8", "2..1", "1..2..0", "log:0..1", "log:1..9..2", "a..b", "1e..2", []])
def test_bad_ranges_are_refused(spec: str | list[Any]) -> None:
    with pytest.raises(InputError):
        spaced(spec, 5)


def test_search_becomes_each() -> None:
    config: dict[str, Any] = {
        "policies": [
            {"kind": "off"},
            {"kind": "head", "gamma": 3.0},
            {"kind": "fixed", "name": "f", "each": {"draft_len": [7]}},
        ]
    }
    add_search(config, {"head.gamma": "0.5..1.5", "f.verify_len": [4, 8]}, 3)
    assert config["policies"][1:] == [
        {"kind": "head", "each": {"gamma": [0.5, 1.0, 1.5]}},
        {"kind": "fixed", "name": "f", "each": {"draft_len": [7], "verify_len": [4, 8]}},
    ]


def test_several_ranges_share_the_candidates() -> None:
    config: dict[str, Any] = {"policies": [{"kind": "head"}]}
    add_search(config, {"head.gamma": "0.5..1.5", "head.min_verify_len": "1..9"}, 16)
    assert [len(v) for v in config["policies"][0]["each"].values()] == [4, 4]


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"haed.gamma": "1..2"}, "search.haed.gamma: no policy haed; there are off, head"),
        ({"head.kind": ["off"]}, "search.head.kind: cannot be searched"),
    ],
)
def test_bad_searches_are_refused(search: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        add_search({"policies": [{"kind": "off"}, {"kind": "head"}]}, search, 4)


def test_ladder_by_hand() -> None:
    """18 candidates, nine seeds, eta 3: 18 -> 6 -> 2; 9 / 9 runs = three of a third, 9 / 3 = three, nine."""
    rungs = ladder(18, Tune(), range(9))
    assert [(len(r.seeds), r.share, r.keep) for r in rungs] == [
        (3, pytest.approx(1 / 3), 6),
        (3, 1.0, 2),
        (9, 1.0, 2),
    ]
    assert [len(r.seeds) for r in ladder(2, Tune(), range(9))] == [9]


@pytest.mark.parametrize("eta", [2, 3, 5])
def test_ladders_end_with_few_candidates_on_all_seeds(eta: int) -> None:
    for n in range(2, 200):
        rungs = ladder(n, Tune(eta=eta), range(8))
        entering = [n, *(r.keep for r in rungs[:-1])]
        assert entering == sorted(entering, reverse=True)
        assert entering[-1] <= max(eta, 2)
        assert (len(rungs[-1].seeds), rungs[-1].share) == (8, 1.0)
        work = [len(r.seeds) * r.share for r in rungs]
        assert work == pytest.approx([8 * eta ** (i - len(rungs) + 1) for i in range(len(rungs))], rel=0.35)


def test_seeds_go_on_from_the_scenarios() -> None:
    p = plan(seeds=[5, 0])
    assert seeds_of(p, Tune(seeds=4)) == [5, 0, 1, 2]
    assert seeds_of(plan(seeds=[5, 0, 7, 8]), Tune(seeds=3)) == [5, 0, 7]


def test_shortened_runs_keep_enough_to_measure() -> None:
    (trial, *_) = plan(workload=closed(requests=400)).trials
    assert shortened(trial, 0.25)["workload"]["requests"] == 100
    assert shortened(trial, 0.01)["workload"]["requests"] == 28  # twice 4 of warm-up, and 20
    (trial, *_) = plan(workload=closed(requests=None, requests_per_client=100)).trials
    assert shortened(trial, 0.5)["workload"].get("requests_per_client") is None
    assert shortened(trial, 0.5)["workload"]["requests"] == 200


def runner(truth: Truth, *, noise: float = 0.05, own: float = 0.002, log: list[Trial] | None = None) -> Run:
    """Metrics of trials: the truth, noise that all policies of a seed share, and a little of their own."""

    def run(trials: list[Trial], what: str) -> pd.DataFrame:
        if log is not None:
            log.extend(trials)
        rows = []
        for t in trials:
            fields = next(p for p in t.config["policies"] if p["name"] == t.policy)
            shared = np.random.default_rng([t.seed, 1]).normal(0, noise)
            mine = np.random.default_rng([t.seed, sum(t.policy.encode())]).normal(0, own)
            speed = truth(fields | t.point | {"seed": t.seed}) * np.exp(shared + mine)
            if np.isfinite(speed):
                row = {"policy": t.policy, "seed": t.seed, "backend": "sim", **t.point}
                rows.append(row | {"output_tok_s": speed, "tpot_p50_ms": 4e3 / speed, "tpot_p99_ms": 8e3 / speed})
        return pd.DataFrame(rows)

    return run


def searched(policies: list[dict[str, Any]], **fields: Any) -> Plan:
    return plan(policies=policies, **fields)


HEADS = {"kind": "head", "name": "head", "each": {"gamma": [float(g) for g in np.round(np.arange(0.2, 3.01, 0.2), 2)]}}


def by_gamma(fields: dict[str, Any]) -> float:
    """1000 tokens/s at gamma 1.2, less by 300 a unit squared; off 400."""
    return 400.0 if fields["kind"] == "off" else 1000.0 - 300.0 * (fields["gamma"] - 1.2) ** 2


def halved(p: Plan, tune: Tune, run: Run, error: float = nan) -> list[Point]:
    return halve(p, tune, run, error=error)


def test_halving_finds_the_best_with_a_fraction_of_the_runs() -> None:
    log: list[Trial] = []
    p = searched([{"kind": "off"}, HEADS])
    (found,) = halved(p, Tune(), runner(by_gamma, log=log))
    assert found.advised is not None
    assert found.advised.candidate.label == "head gamma=1.2"
    assert found.advised.status == BEST
    assert [s.status for s in found.standings].count(WORSE) >= 1
    assert len({(t.policy, t.seed, str(t.config["workload"])) for t in log}) < 16 * 9 * 0.6
    assert sorted(s.candidate.label for s in found.standings) == sorted(c.label for c in candidates_of(p))


def test_common_noise_of_a_third_does_not_blur_the_order() -> None:
    """Unpaired, seeds that move all policies by 30 % would drown gains of 1.2 %; paired they are told."""
    (found,) = halved(searched([{"kind": "off"}, HEADS]), Tune(seeds=10), runner(by_gamma, noise=0.3))
    assert found.advised is not None
    assert found.advised.candidate.label == "head gamma=1.2"


def test_near_equals_cannot_be_told_and_the_simplest_stands_first() -> None:
    """A head that gains 0.5 % over a fixed length is not worth the head."""
    policies: list[dict[str, Any]] = [{"kind": "head"}, {"kind": "off"}, {"kind": "fixed", "verify_len": 4}]
    (found,) = halved(
        searched(policies), Tune(), runner(lambda f: {"head": 1005.0, "off": 500.0, "fixed": 1000.0}[f["kind"]], own=1e-4)
    )
    assert [(s.candidate.label, s.status) for s in found.standings] == [
        ("fixed(verify_len=4)", ALIKE),
        ("head", BEST),
        ("off", WORSE),
    ]


def test_noise_does_not_advise_what_is_far_behind() -> None:
    """Up and down by 30 % with the seeds, 15 % less speed cannot be told from the leader; it is not advised for that."""
    policies: list[dict[str, Any]] = [{"kind": "head"}, {"kind": "off"}]
    run = runner(lambda f: 1000.0 if f["kind"] == "head" else 850.0 * 1.3 ** (f["seed"] % 2 * 2 - 1))
    (found,) = halved(searched(policies), Tune(seeds=4), run)
    assert [(s.candidate.label, s.status, s.near) for s in found.standings] == [
        ("head", BEST, True),
        ("off", ALIKE, False),
    ]
    (says,) = answer([found], THROUGHPUT, Tune())
    assert says.startswith("use head (")
    assert says.endswith("behind on average, but noise hides whether worse: off (more seeds may tell).")


def test_a_gain_within_the_models_error_is_not_told() -> None:
    policies: list[dict[str, Any]] = [{"kind": "head"}, {"kind": "fixed", "verify_len": 4}]
    run = runner(lambda f: 1050.0 if f["kind"] == "head" else 1000.0, own=1e-4)
    for error, first in ((nan, "head"), (0.04, "head"), (0.08, "fixed(verify_len=4)")):
        (found,) = halved(searched(policies), Tune(), run, error)
        assert found.advised is not None
        assert found.advised.candidate.label == first


def test_every_point_has_its_own_best() -> None:
    def truth(fields: dict[str, Any]) -> float:
        return 1000.0 - 50 * abs(fields.get("verify_len", 1) - 32 / fields["workload.concurrency"])

    fixed = {"kind": "fixed", "name": "fixed", "each": {"verify_len": [2, 4, 6, 8, 10, 12, 14, 16]}}
    p = searched([fixed], sweep={"workload.concurrency": [2, 4, 8]})
    found = halved(p, Tune(), runner(truth))
    best = {tuple(f.point.values()): f.advised.candidate.label for f in found if f.advised is not None}
    assert best == {(2,): "fixed verify_len=16", (4,): "fixed verify_len=8", (8,): "fixed verify_len=4"}


def test_limits_come_before_the_goal() -> None:
    """TPOT p99 is 8000 / speed: at most 9 ms allows all above 889 tokens/s; least tokens per round are asked for."""
    tune = Tune(goal="tpot_p50_ms", limits={"output_tok_s": 950.0})
    (found,) = halved(searched([{"kind": "off"}, HEADS]), tune, runner(by_gamma, noise=0.0))
    assert found.advised is not None
    assert found.advised.values["output_tok_s"] >= 950
    (found,) = halved(searched([{"kind": "off"}, HEADS]), Tune(limits={"tpot_p99_ms": 1.0}), runner(by_gamma))
    assert found.advised is None
    assert {s.status for s in found.standings if s.rung == 2} == {OVER}
    assert found.standings[0].candidate.label == "head gamma=1.2"  # nearest to the limit


def test_whether_a_limit_is_kept_may_not_be_told() -> None:
    (found,) = halved(searched([{"kind": "off"}, HEADS]), Tune(limits={"tpot_p99_ms": 8.0}), runner(by_gamma))
    assert {s.candidate.label: s.limits for s in found.standings}["head gamma=1.2"] == "cannot tell"


def test_failed_candidates_are_out() -> None:
    (found,) = halved(
        searched([{"kind": "off"}, HEADS]), Tune(), runner(lambda f: nan if f.get("gamma") == 1.2 else by_gamma(f))
    )
    status = {s.candidate.label: s.status for s in found.standings}
    assert status["head gamma=1.2"] == FAILED
    assert found.advised is not None
    assert found.advised.candidate.label in {"head gamma=1.0", "head gamma=1.4"}


def test_the_frontier_is_what_nothing_beats() -> None:
    rng = np.random.default_rng(0)
    rate, latency = rng.integers(0, 8, 60).astype(float), rng.integers(0, 8, 60).astype(float)
    kept = pareto(rate, latency)
    pairs = list(zip(rate, latency, strict=True))
    for (r, t), k in zip(pairs, kept, strict=True):
        beaten = any((a >= r and b <= t) and (a > r or b < t) for a, b in pairs)
        assert not (k and beaten)
        assert beaten or any(q and pairs[i] == (r, t) for i, q in enumerate(kept))
    assert not pareto(np.array([1.0, nan]), np.array([nan, 1.0])).any()


SMALL = ["--set", "sweep.workload.concurrency=[2]", "--set", "policies=[{kind: head}, {kind: fixed}]", "--workers", "1"]
SMALL += ["--set", "workload.requests=24"]


def test_a_search_resumes_to_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the trials lost, and resumed: the report of a search that was never interrupted."""
    call = ["tune", "smoke", *SMALL, "--search", "head.gamma=0.5..1.5", "--search", "fixed.verify_len=[4, 8]"]
    call += ["--candidates", "3", "--seeds", "3", "--json"]
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert adasim(*call, "--out", whole) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in document["candidates"]} == {
        *(f"head gamma={g}" for g in (0.5, 1.0, 1.5)),
        *(f"fixed verify_len={n}" for n in (4, 8)),
    }
    assert document["answer"][0].startswith("At concurrency 2: use ")
    assert adasim(*call, "--out", out) == 0
    for i, folder in enumerate(sorted((out / "trials").iterdir())):
        if i % 2:
            folder.rename(out / "trials" / f".{folder.name}")  # as a killed run leaves them
    assert adasim(*call, "--out", out) == 2
    assert adasim(*call, "--out", out, "--resume") == 0
    for name in ("report.html", "report.md", "tables/candidates.csv", "figures/frontier.png"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert json.loads((out / "manifest.json").read_text())["made_by"] == "tune"
    assert "holds results; use --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--search", "head"], "--search head: expected NAME=VALUE"),
        (["--search", "hd.gamma=1..2"], "search.hd.gamma: no policy hd; there are head, fixed"),
        (["--search", "head.gamma=2..1"], "tune.search.head.gamma: '2..1': must rise"),
        (["--search", "head.gama=1..2"], "unknown key; did you mean gamma?"),
        (["--limit", "tpot=3"], "unknown metric tpot; allowed: output_tok_s"),
        (["--goal", "speed"], "unknown metric speed"),
        (["--set", "policies=[{kind: head}]"], "tune: needs two candidates"),
        (["--set", "slo=null", "--goal", "goodput_rps"], "tune: goodput_rps and slo_met need an slo"),
        (["--executor", "slurm"], "--executor slurm: unknown"),
    ],
)
def test_bad_calls(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adasim("tune", "smoke", *SMALL, *arguments, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_run_says_that_it_does_not_search(tmp_path: Path) -> None:
    """A scenario may hold its search; ``run`` ignores it aloud, and its trials stay the same."""
    with_search = plan(tune={"search": {"fixed.verify_len": [2, 4]}})
    assert [t.key for t in with_search.trials] == [t.key for t in plan().trials]
    assert with_search.notes == ["tune is what adasim tune searches; nothing is searched here"]
    assert Counter(t.policy for t in with_search.trials) == {"off": 2, "fixed(verify_len=4)": 2}
