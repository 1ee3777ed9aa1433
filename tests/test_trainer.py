"""The trainer as a process: its clock, its GPUs, its versions, rollback, alarms, and what a report says of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from adasim import adaptation, report
from adasim.calibration.alarm import Alarm, run_length
from adasim.calibration.rollback import Rollback, Served
from adasim.executors import Local
from adasim.experiment import collect, prepare, timelines
from adasim.plan import Plan
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.records import EventRecord, Records, frame
from adasim.story import tell
from tests.build import OFF, backend, closed, plan, simulate

QUICK: dict[str, Any] = {"buffer": 8, "token_us": 20.0, "setup_s": 0.01, "reload_ms": 5.0}
TWO = {
    "kind": "curves",
    "curves": {"code": {"kind": "geometric", "alpha": 0.85}, "chat": {"kind": "geometric", "alpha": 0.6}},
}
SHIFT = {"kind": "step", "points": [{"at": 0, "mix": {"code": 1.0}}, {"at": 300, "mix": {"chat": 1.0}}]}


def learned(learning: dict[str, Any], workload: dict[str, Any] | None = None, **fields: Any) -> Records:
    return simulate(
        Fixed(verify_len=16), workload=workload or closed(requests=120), backend=backend(learning=learning, **fields)
    )


def versions(records: Records) -> pd.DataFrame:
    assert records.versions is not None
    return records.versions.drop_duplicates("version").set_index("version")


def events(records: Records, kind: str) -> pd.DataFrame:
    return records.events[records.events["kind"] == kind]


# ---- the clock


def test_a_frozen_drafter_changes_nothing() -> None:
    plain = simulate(Head())
    frozen = simulate(Head(), backend=backend(learning={"loss": "frozen"}))
    for table in ("steps", "requests", "blocks", "gaps"):
        pd.testing.assert_frame_equal(getattr(plain, table), getattr(frozen, table))
    assert versions(frozen)["gpu_s"].sum() == 0


def test_a_round_takes_its_work_over_its_gpus() -> None:
    """128 tokens a request, 8 requests, 2 epochs, 20 us a token: 0.041 s and 0.01 s of set-up, on 2 GPUs half of it."""
    done = versions(learned(QUICK)).dropna(subset=["ready_s"])
    assert len(done) > 5
    assert (done["tokens"] == done["samples"] * 128 * 2).all()
    assert done["gpu_s"].to_numpy() == pytest.approx(0.01 + 20e-6 * done["tokens"].to_numpy())
    assert (done["ready_s"] - done["began_s"]).to_numpy() == pytest.approx(done["gpu_s"].to_numpy() / 2)


def test_the_engine_stands_still_to_load() -> None:
    """Between two steps, for reload_ms and the draft keys of the running contexts."""
    records = learned({**QUICK, "recompute_us": 10.0})
    steps, loaded = records.steps, events(records, "reload")
    for _, event in loaded.iterrows():
        last = steps[steps["end_s"] < event["time_s"]].iloc[-1]
        assert event["time_s"] - last["end_s"] == pytest.approx(event["seconds"])
        assert event["seconds"] > 0.005 + 10e-6 * 64
    pauses = (steps["start_s"].to_numpy()[1:] - steps["end_s"].to_numpy()[:-1]).sum()
    assert pauses == pytest.approx(loaded["seconds"].sum())


def test_a_version_serves_only_after_it_was_trained_and_loaded() -> None:
    records = learned(QUICK)
    table = versions(records)
    begun = table[1:].dropna(subset=["loaded_s"])
    assert (begun["began_s"] < begun["ready_s"]).all()
    assert (begun["ready_s"] <= begun["loaded_s"]).all()
    first_s = records.steps.groupby("draft_version")["start_s"].min()
    assert (first_s >= table["loaded_s"].loc[first_s.index]).all()
    assert (np.diff(records.steps["draft_version"]) >= 0).all()


def test_requests_in_flight_can_stay_with_their_version() -> None:
    """As if nothing had been loaded, until they finish; or at once with the new one."""
    spoilt = {**QUICK, "faults": {1: 0.6}}
    frozen = learned({"loss": "frozen"}).requests
    kept, moved = (learned({**spoilt, "in_flight": f}) for f in ("old", "new"))
    for records in (kept, moved):
        loaded_s = events(records, "reload")["time_s"].iloc[0]
        r = records.requests
        flying = r[(r["first_token_s"] < loaded_s) & (r["finish_s"] > loaded_s + 0.03)].index
        assert len(flying) >= 2
        more = r.loc[flying, "rounds"] - frozen.loc[flying, "rounds"]
        assert (more == 0).all() if records is kept else (more >= 0).all() and more.sum() > 0


def test_a_shared_gpu_does_one_thing_at_a_time() -> None:
    """While serving is busy all training is taken from its steps: a third of the GPU makes a step half as long again."""
    shared = learned({**QUICK, "shared": 1 / 3}, closed(requests=200, drain=False))
    table, steps = versions(shared), shared.steps
    assert len(table) > 10
    assert table["taken_s"].to_numpy() == pytest.approx(table["gpu_s"].to_numpy(), abs=1e-9)
    assert steps["overhead_s"].sum() == pytest.approx(table["taken_s"].sum())  # this cost model has no other overhead
    own_s = steps["draft_s"] + steps["verify_s"] + steps["prefill_s"]
    assert (steps["end_s"] - steps["start_s"] <= 1.5 * own_s + 1e-9).all()
    assert (steps["overhead_s"] > 0.49 * own_s).mean() > 0.3
    assert table["gpus"].iloc[0] == 0


def test_an_idle_shared_gpu_trains_at_full_speed() -> None:
    """One request every 10 s or so: nearly all of a round's work is done between them, at once."""
    slow = {"kind": "poisson", "rate_rps": 0.1, "requests": 60}
    done = versions(learned({**QUICK, "shared": 0.5, "setup_s": 1.0}, slow)).dropna(subset=["ready_s"])
    assert len(done) > 4
    assert done["taken_s"].sum() < 0.2 * done["gpu_s"].sum()
    wall = done["ready_s"] - done["began_s"]
    assert (wall >= done["gpu_s"] - 1e-9).all()
    assert wall.median() == pytest.approx(done["gpu_s"].median())


def test_gpu_seconds_of_an_unfinished_round_are_counted() -> None:
    """One endless round: the trainer's GPUs have worked from its start to the end of the run."""
    records = learned({**QUICK, "token_us": 1e6})
    last = versions(records).iloc[-1]
    assert last["outcome"] == "training"
    end_s = records.steps["end_s"].iloc[-1]
    assert last["gpu_s"] == pytest.approx(2 * (end_s - last["began_s"]))


def test_conservation_of_samples() -> None:
    """Every finished request is trained on at most once as fresh; a round needs as many as ``refresh`` says."""
    records = learned({**QUICK, "refresh": 4})
    table = versions(records)[1:]
    finished = int((records.requests["status"] == "finished").sum())
    assert finished - 8 <= table["fresh"].sum() <= finished
    assert (table["fresh"] >= 4).all()
    assert (table["samples"] <= 8).all()


def test_mixed_domains_learn_by_their_share() -> None:
    learning = {**QUICK, "curve": {"rounds": 1.0, "forgetting_rounds": 4.0}}
    records = learned(learning, closed(requests=600, domains=SHIFT), acceptance=TWO)
    assert records.versions is not None
    tau = records.versions.pivot(index="version", columns="domain", values="tau")
    shift_s = events(records, "drift")["time_s"].iloc[0]
    at = versions(records)["began_s"].searchsorted(shift_s) - 1
    assert tau["code"].iloc[at] > tau["code"].iloc[0] > tau["chat"].iloc[at]  # learned; forgotten unseen
    assert tau["code"].iloc[-1] < tau["code"].iloc[at]
    assert tau["chat"].iloc[-1] > tau["chat"].iloc[0]


# ---- rollback


def served(values: dict[int, list[float]]) -> Served:
    found = Served()
    for domain, taus in values.items():
        for value in taus:
            found.add(domain, value)
    return found


def test_change_between_versions_by_hand() -> None:
    """3, 5 against 5, 7: -2 with a standard error of sqrt(2/2 + 2/2), 2 degrees of freedom, t = 4.303."""
    change = Rollback(confidence=0.95).change(served({0: [3, 5]}), served({0: [5, 7]}))
    assert change is not None
    assert change.tau == pytest.approx(-2)
    assert change.half_width == pytest.approx(4.3027 * np.sqrt(2), rel=1e-3)
    assert not Rollback().is_worse(change)


def test_a_change_of_mix_is_not_a_versions_fault() -> None:
    old = served({0: [8.0, 8.2] * 20, 1: [3.0, 3.2] * 2})
    new = served({0: [8.0, 8.2] * 2, 1: [3.0, 3.2] * 20})
    change = Rollback().change(new, old)
    assert change is not None
    assert change.tau == pytest.approx(0)
    assert Rollback().change(served({0: [8, 8]}), served({1: [3, 3]})) is None


def test_a_spoilt_version_is_rolled_back() -> None:
    learning = {**QUICK, "refresh": 4, "rollback": {"requests": 16}, "faults": {3: 0.6}}
    records = learned(learning, closed(requests=400))
    (back,) = events(records, "rollback").to_dict("records")
    table = versions(records)
    bad = int(back["draft_version"])
    ancestors = [bad]
    while ancestors[-1]:
        ancestors.append(int(table["parent"][ancestors[-1]]))
    assert 3 in ancestors  # itself, or the first loaded one that was trained from it
    assert "tau -" in back["detail"]
    assert table["outcome"][bad] == "rolled back"
    after = records.steps[records.steps["start_s"] > back["time_s"] + 0.01]
    good = int(after["draft_version"].iloc[0])
    assert good < 3
    later = table[table["loaded_s"] > back["time_s"]]
    assert len(later) > 0
    assert (later["tau"] > 0.9 * table["tau"][0]).all()  # nothing trained from the bad one is ever used


def test_sound_versions_stay() -> None:
    """At 99 % a version that is as good falls once in 200."""
    still = {"gain": 0.0, "forgetting_rounds": None}
    records = learned({**QUICK, "refresh": 4, "curve": still, "rollback": {"requests": 16}}, closed(requests=1200))
    loaded = len(events(records, "reload"))
    assert loaded > 40
    assert len(events(records, "rollback")) <= 2


def test_no_version_is_loaded_before_the_last_was_judged() -> None:
    records = learned({**QUICK, "refresh": 4, "rollback": {"requests": 16}}, closed(requests=300))
    finished = events(records, "reload")["finished"]
    assert (np.diff(finished) >= 16).all()


# ---- alarms


def test_run_lengths_of_a_cusum() -> None:
    """Textbook values at k = 0.5: h = 5 alarms falsely after 930 and sees one standard deviation after 10.4."""
    assert run_length(0.0, 0.5, 5.0) == pytest.approx(930, rel=0.02)
    assert run_length(1.0, 0.5, 5.0) == pytest.approx(10.4, rel=0.02)
    assert run_length(0.0, 0.5, 4.0) == pytest.approx(335, rel=0.02)
    assert run_length(0.5, 0.5, 4.0) == pytest.approx((4 + 1.166) ** 2)


@pytest.mark.parametrize("kind", ["normal", "skewed", "two modes"])
def test_false_alarms_come_as_rarely_as_asked_for(kind: str) -> None:
    rng = np.random.default_rng(1)
    values = {
        "normal": lambda: rng.standard_normal(60_000),
        "skewed": lambda: rng.gamma(2, 1, 60_000),
        "two modes": lambda: np.where(rng.random(60_000) < 0.1, 6, 3) + 0.4 * rng.standard_normal(60_000),
    }[kind]()
    chart = Alarm(false_alarm_requests=300).chart()
    alarms = sum(chart(v) is not None for v in values.tolist())
    assert 0.9 * 300 < 60_000 / alarms < 1.5 * 300  # rather too rarely: the ranks of the first few say little


@pytest.mark.parametrize("shift", [-1.0, 1.0, 2.0])
def test_delay_of_an_alarm(shift: float) -> None:
    """After 300 quiet requests a shift is seen about as soon as theory says where the mean is known."""
    rng, alarm = np.random.default_rng(2), Alarm()
    delays = []
    for _ in range(60):
        chart = alarm.chart()
        if any(chart(v) for v in rng.standard_normal(300).tolist()):
            continue
        for n, v in enumerate((rng.standard_normal(500) + shift).tolist(), 1):
            if (says := chart(v)) is not None:
                assert says == ("rose" if shift > 0 else "fell")
                delays.append(n)
                break
    assert len(delays) > 50
    expected = run_length(abs(shift), alarm.shift / 2, alarm.threshold)
    assert 0.7 * expected < np.mean(delays) < 1.6 * expected
    assert run_length(1.0, 0.5, alarm.threshold) == alarm.delay_requests


def test_a_drift_of_the_mix_alarms() -> None:
    """Mixes move the tau of all requests, not that of a domain."""
    records = learned({"loss": "frozen"}, closed(requests=600, domains=SHIFT), acceptance=TWO, alarm={})
    drift, alarm = events(records, "drift").iloc[0], events(records, "alarm").iloc[0]
    assert drift["detail"] == "mix chat 1"
    assert alarm["detail"] == "tau fell"
    assert 0 < alarm["finished"] - drift["finished"] < 40
    row = adaptation.summary(records)
    assert row["alarm_delay_s"] == pytest.approx(alarm["time_s"] - drift["time_s"])
    assert (row["alarms_before_drift"], row["drifts_missed"]) == (0, 0)


def test_alarms_need_no_learning() -> None:
    records = simulate(Fixed(verify_len=16), backend=backend(alarm={"watch": "all"}))
    assert records.versions is None
    assert adaptation.summary(records)["alarms"] == 0
    assert adaptation.summary(simulate(OFF)) == {}


def test_delays_by_hand() -> None:
    """Drifts at 10 and 20 s, alarms at 5, 12, 15 s: one early, one after 2 s and 4 requests, one drift missed."""
    rows = [(5, "alarm", 3), (10, "drift", 6), (12, "alarm", 10), (15, "alarm", 12), (20, "drift", 16)]
    table = frame(EventRecord, [EventRecord(at, kind, 0, 0.0, "", "", n) for at, kind, n in rows])
    row = adaptation._alarms(table)
    assert (row["alarms"], row["alarms_before_drift"], row["drifts"], row["drifts_missed"]) == (3, 1, 2, 1)
    assert (row["alarm_delay_s"], row["alarm_delay_requests"]) == (2, 4)


# ---- what it was worth


def test_payback_by_hand() -> None:
    """1 ms a token frozen, 1000 tokens in 0.8 s learning: 0.2 s saved; 0.4 s of training is half paid back.

    At 0.05 s saved a second the rest takes 4 s.
    """
    assert adaptation.payback(1e-3, 0.8, 1000, 0.4) == pytest.approx(0.5)
    assert adaptation.repaid_after_s(0.2, 0.4, 0.05) == pytest.approx(4.0)
    assert adaptation.repaid_after_s(0.5, 0.4, -1.0) == 0
    assert adaptation.repaid_after_s(0.2, 0.4, 0.0) == np.inf


def test_costs_add_up() -> None:
    """Serving is its steps and pauses without the training in them; training is what its versions took."""
    for learning in (QUICK, {**QUICK, "shared": 0.5}):
        records = learned(learning)
        row, table = adaptation.summary(records), versions(records)
        busy = (records.steps["end_s"] - records.steps["start_s"]).sum() + events(records, "reload")["seconds"].sum()
        assert row["serving_gpu_s"] == pytest.approx(busy - table["taken_s"].sum())
        assert row["trainer_gpu_s"] == pytest.approx(table["gpu_s"].sum())
        assert row["tokens"] == records.requests["tokens"].sum()
        assert row["trainer_reserved_s"] == pytest.approx(
            table["gpu_s"].sum() if "shared" in learning else 2 * records.steps["end_s"].iloc[-1]
        )


@pytest.fixture(scope="module")
def drifting() -> Plan:
    learning = {**QUICK, "curve": {"rounds": 1.0}, "rollback": {"requests": 8}}
    return plan(
        workload=closed(requests=400, domains=SHIFT),
        backend=backend(acceptance=TWO, learning=learning, alarm={}),
        policies=[{"kind": "head"}],
        sweep={"backend.learning.loss": ["frozen", "adaflash"]},
        seeds=[0],
    )


def test_same_seed_same_bytes_and_a_report_of_it(drifting: Plan, tmp_path: Path) -> None:
    """Versions, events and the report are the same bytes; the page says whether training pays and what alarms saw."""
    contents = []
    for name in ("a", "b"):
        out = tmp_path / name
        todo = prepare(drifting, out, resume=False, overwrite=False)
        assert not Local(1).run(todo, out, trace=False, progress=lambda _: None).failures
        trials, notes = collect(drifting, out)
        story = tell(drifting, len(trials), notes)
        story.timelines = timelines(drifting, out)
        tables = report.write(trials, story, out)
        contents.append({f.relative_to(out): f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file()})
        del contents[-1][Path("manifest.json")]
    assert contents[0] == contents[1]
    assert {"versions.parquet", "events.parquet"} <= {p.name for p in contents[0]}
    assert Path("figures/adaptation.png") in contents[0]
    page = contents[0][Path("report.md")].decode()
    assert "## Does training pay back?" in page
    assert "## Versions and alarms" in page
    (row,) = tables.payback.to_dict("records")
    assert row["trainer_share"] > 0
    assert row["reserved_share"] >= row["trainer_share"]
    assert len(story.timelines) == 2
    assert set(story.timelines[0].tau["domain"]) == {"", "code", "chat"}


def test_payback_compares_with_the_frozen_drafter_of_the_same_run() -> None:
    common = {"policy": "head", "seed": 0, "tpot_p50_ms": 2.0, "output_tok_s": 100.0, "trainer_taken_s": 0.0}
    frozen = {"serving_gpu_s": 10.0, "tokens": 1000.0, "late_serving_us_per_token": 10e3}
    taught = {"serving_gpu_s": 16.0, "tokens": 2000.0, "late_serving_us_per_token": 7.5e3}
    costs = {"trainer_gpu_s": 8.0, "trainer_reserved_s": 16.0, "wall_s": 20.0}
    trials = pd.DataFrame(
        [
            {**common, **frozen, **dict.fromkeys(costs, 0.0), "b.learning.loss": "frozen"},
            {**common, **taught, **costs, "b.learning.loss": "adaflash", "output_tok_s": 125.0},
        ]
    )
    (row,) = adaptation.paybacks(trials, ["b.learning.loss"], open_loop=False).to_dict("records")
    assert (row["throughput"], row["tpot"]) == (0.25, 0.0)
    assert (row["trainer_share"], row["reserved_share"]) == (0.5, 1.0)
    assert (row["payback"], row["payback_reserved"]) == (0.5, 0.25)  # 20 s frozen, 16 s now: 4 s for 8 s, held 16 s
    assert row["late_saving"] == pytest.approx(0.25)
    assert row["engines"] == pytest.approx(1.0 / 0.25)
    assert row["repaid_after_s"] == pytest.approx(4 / (2.5e-3 * 100))
    shared = trials.assign(trainer_taken_s=[0.0, 3.0])
    (row,) = adaptation.paybacks(shared, ["b.learning.loss"], open_loop=True).to_dict("records")
    assert np.isnan([row["payback"], row["engines"], row["repaid_after_s"]]).all()
    assert adaptation.paybacks(trials, ["x"], open_loop=False).empty
