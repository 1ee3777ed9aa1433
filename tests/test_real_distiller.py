"""A trainer in a process of its own: it improves serving, and nothing it does can harm it."""

import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from adasim.calibration.rollback import Change, Rollback  # noqa: E402
from adasim.policies.fixed import Fixed  # noqa: E402
from adasim.real.checkpoint import Checkpoint  # noqa: E402
from adasim.real.distiller import Distiller  # noqa: E402
from adasim.real.draft import Drafter  # noqa: E402
from adasim.real.engine import Engine  # noqa: E402
from adasim.real.opd import Opd  # noqa: E402
from adasim.real.sampling import Sampling  # noqa: E402
from adasim.real.target import Target  # noqa: E402
from adasim.real.train_opd import OpdTrainer  # noqa: E402
from adasim.real.versions import Version  # noqa: E402
from adasim.real.weights import random_target  # noqa: E402
from adasim.records import Records  # noqa: E402
from tests.fake_trainer import FAKE  # noqa: E402
from tests.test_real_engine import ARCH, BLOCK, plain, prompts, serve  # noqa: E402
from tests.test_real_opd import SHAPE, collect, fresh  # noqa: E402


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(ARCH, seed=1, gain=0.02)


@pytest.fixture(scope="module")
def trained(target: Target) -> Checkpoint:
    """A drafter that accepts something worth losing."""
    learner = OpdTrainer(
        Opd(epochs=12, rate=3e-3, positions="text"), fresh(head=True), target.embedding, target.head_weight
    )
    learner.train(collect(target, BLOCK, 24))
    return learner.checkpoint()


def wait(distiller: Distiller, engine: Engine, seconds: float = 60.0) -> None:
    """Serving pauses until the trainer has done what it was given, so that tests do not race."""
    end = time.monotonic() + seconds
    while not distiller.idle and not distiller.trainer.failed and time.monotonic() < end:
        time.sleep(0.01)
        distiller.poll(engine)


def distil(
    target: Target, start: Checkpoint, root: Path, opd: Opd, rounds: int, how: str = ""
) -> tuple[Records, Distiller]:
    """Serve the same 8 prompts ``rounds`` times over; serving pauses for the trainer."""
    texts = prompts(8) * rounds
    start_drafter = Drafter(SHAPE, start.weights, target, start.vocab)
    command = (sys.executable, "-c", FAKE, how) if how else (sys.executable, "-m", "adasim.real.opd_process")
    with Distiller(opd, start, target, "random-tiny", Sampling(), root, ["a", "b"], command, 0.0) as distiller:

        def between(engine: Engine) -> None:
            distiller.poll(engine)
            wait(distiller, engine)

        run = serve(
            target, start_drafter, Fixed(verify_len=BLOCK), texts, collector=distiller.collector,
            full_verify_share=opd.full_verify_share, between=between, domains=["a", "b"],
        )  # fmt: skip
    assert run.texts == [plain(target, p, 24) for p in prompts(8)] * rounds
    return run.engine.recorder.records(run.engine.admission.lives), distiller


def tau(records: Records, version: int) -> float:
    blocks = records.blocks[records.blocks["draft_version"] == version]
    return 1 + float((blocks["accepted"] * blocks["blocks"]).sum() / blocks["blocks"].sum())


def test_versions_come_from_the_trainer_and_accept_more(target: Target, tmp_path: Path) -> None:
    opd = Opd(buffer=16, epochs=8, rate=3e-3, positions="text", rollback=Rollback(requests=8), keep="kept")
    records, distiller = distil(target, fresh(head=True), tmp_path / "opd", opd, rounds=6)
    reloads = records.events[records.events["kind"] == "reload"]
    assert reloads["draft_version"].tolist() == [1, 2, 3][: len(reloads)]
    assert len(reloads) >= 2
    assert (reloads["seconds"] > 0).all()
    assert (records.events.loc[records.events["kind"] == "trained", "seconds"] > 0).sum() == len(reloads)
    assert "trained on 16 requests" in reloads["detail"].iloc[0]
    assert tau(records, 2) > tau(records, 0) + 0.5
    assert {0, 1, 2} <= set(records.requests["draft_version"]) <= {0, *reloads["draft_version"]}
    assert records.steps["draft_version"].is_monotonic_increasing
    assert not distiller.trainer.failed
    assert distiller.trainer.process is not None
    assert distiller.trainer.process.poll() in (0, -9)  # ended when it was asked to, or was made to on a busy machine


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("crash", "trainer_failed", "RuntimeError: out of memory"),
        ("hang", "trainer_failed", "no sign of life"),
        ("truncated", "refused", "checksum"),
        ("nan", "refused", "not finite"),
    ],
)
def test_a_broken_trainer_leaves_serving_untouched_and_is_reported(
    target: Target, trained: Checkpoint, tmp_path: Path, how: str, kind: str, says: str
) -> None:
    opd = Opd(buffer=24, rollback=Rollback(requests=8), hang_s=0.6 if how == "hang" else 60)
    records, distiller = distil(target, trained, tmp_path, opd, rounds=4, how=how)
    (event,) = records.events.to_dict("records")
    assert event["kind"] == kind
    assert says in event["detail"]
    assert (records.steps["draft_version"] == 0).all()
    assert (records.requests["status"] == "finished").all()
    if kind == "trainer_failed":
        assert any("ALARM" in note and says in note for note in distiller.notes())


def test_a_version_that_accepts_less_is_rolled_back(target: Target, trained: Checkpoint, tmp_path: Path) -> None:
    opd = Opd(buffer=64, rollback=Rollback(requests=16))
    records, distiller = distil(target, trained, tmp_path, opd, rounds=14, how="degraded")
    events = records.events
    assert events["kind"].tolist()[:3] == ["trained", "reload", "rollback"]
    assert events["draft_version"].tolist()[:3] == [1, 1, 0]
    assert "ALARM: version 1: tau -" in events["detail"].iloc[2]
    assert tau(records, 1) < tau(records, 0) - 0.3
    assert records.steps["draft_version"].iloc[-1] == 0
    assert distiller.folder.base_version.read_text() == "0"


def test_the_real_trainer_goes_on_from_the_version_it_was_sent_back_to(
    target: Target, trained: Checkpoint, tmp_path: Path
) -> None:
    """A learning rate that ruins the drafter: what it made is rolled back and never built upon."""
    opd = Opd(buffer=24, epochs=1, rate=1.0, rollback=Rollback(requests=16), keep="kept")
    records, distiller = distil(target, trained, tmp_path, opd, rounds=16)
    used, bad = 0, set()
    for event in records.events.to_dict("records"):
        if event["kind"] == "rollback":
            bad.add(used)
        if event["kind"] == "reload":
            version = distiller.folder.versions.load(event["draft_version"], trained)
            assert isinstance(version, Version)
            assert version.manifest["parent"] not in bad
        if event["kind"] in ("reload", "rollback"):
            used = event["draft_version"]
            assert used not in bad
    assert bad


def alone(target: Target, start: Checkpoint, root: Path, opd: Opd) -> Distiller:
    """The serving side; nobody trains."""
    return Distiller(opd, start, target, "random-tiny", Sampling(), root, ["a"], check_s=0.0)


@pytest.mark.parametrize("want", [24, 1], ids=["prompts longer than samples", "one token each"])
def test_requests_that_show_no_round_stop_no_reload(
    target: Target, trained: Checkpoint, tmp_path: Path, want: int
) -> None:
    """Samples are cut to 16 tokens: of long prompts they keep no round. A single token takes none."""
    opd = Opd(buffer=64, max_tokens=16, rollback=Rollback(requests=4))
    distiller = alone(target, trained, tmp_path / "opd", opd)
    texts = [p * 20 for p in prompts(6)] if want > 1 else prompts(6)
    texts = [p[:40] for p in texts] + [p[:3] for p in prompts(6)]
    serve(
        target, Drafter(SHAPE, trained.weights, target, trained.vocab), Fixed(verify_len=BLOCK), texts, want=want,
        collector=distiller.collector, between=distiller.poll,
    )  # fmt: skip
    assert distiller.keeper.judge.waiting == (want == 1)  # without rounds nobody was seen, and nobody is waited for
    assert not distiller.keeper.judge._cohort


def test_what_came_from_a_version_that_was_rolled_back_is_never_used(
    target: Target, trained: Checkpoint, tmp_path: Path
) -> None:
    """Version 3 is newer than 2, which came from 1, which fell: all three go, though nobody ever loaded 2."""
    distiller = alone(target, trained, tmp_path / "opd", Opd(rollback=None, keep="kept"))
    facts = {"samples": 1, "train_s": 0.0, "steps": 0, "losses": [0.0], "clipped": 0.0}

    def publish(parent: int) -> None:
        distiller.folder.versions.publish(trained, {"parent": parent, **facts})

    def between(engine: Engine) -> None:
        if len(engine.recorder.steps) == 2:
            publish(0)
        if len(engine.recorder.steps) == 4:
            assert distiller.keeper.current == 1
            publish(1)
            publish(2)
            distiller.keeper.worse = Change(-1.0, 0.1)
        if len(engine.recorder.steps) == 6:
            assert distiller.keeper.current == 0
            publish(0)
        distiller.poll(engine)

    drafter = Drafter(SHAPE, trained.weights, target, trained.vocab)
    run = serve(target, drafter, Fixed(verify_len=2), prompts(4), collector=distiller.collector, between=between)
    events = [(e.kind, e.draft_version) for e in run.engine.recorder.events]
    assert events == [
        ("trained", 1), ("reload", 1), ("rollback", 0), ("refused", 2), ("refused", 3), ("trained", 4), ("reload", 4),
    ]  # fmt: skip
    assert distiller.keeper.current == 4


def test_serving_never_waits_for_the_trainer(target: Target, trained: Checkpoint, tmp_path: Path) -> None:
    with Distiller(
        Opd(buffer=8),
        trained,
        target,
        "random-tiny",
        Sampling(),
        tmp_path,
        ["a"],
        (sys.executable, "-c", FAKE, "hang"),
        0.0,
    ) as distiller:
        start = time.monotonic()
        drafter = Drafter(SHAPE, trained.weights, target, trained.vocab)
        serve(
            target, drafter, Fixed(verify_len=BLOCK), prompts(8) * 6, collector=distiller.collector,
            between=distiller.poll,
        )  # fmt: skip
        served_s = time.monotonic() - start
    assert distiller.buffer.full  # bounded, although nobody takes it
    assert distiller.buffer.dropped > 0
    assert len(distiller.buffer.samples) == 8
    assert served_s < 30
    assert time.monotonic() - start < served_s + 15  # and it ends soon after
