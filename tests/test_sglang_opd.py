"""``opd:`` of the SGLang backend, against a made-up server: a trainer beside a run, and a server that stays as it was."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from adasim.calibration.alarm import Alarm  # noqa: E402
from adasim.errors import InputError  # noqa: E402
from adasim.policies.base import Policy  # noqa: E402
from adasim.policies.fixed import Fixed  # noqa: E402
from adasim.policies.off import Off  # noqa: E402
from adasim.policies.threshold import Threshold  # noqa: E402
from adasim.real import trainer_process  # noqa: E402
from adasim.real.checkpoint import Checkpoint, save_checkpoint  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.opd_process import COMMAND  # noqa: E402
from adasim.real.replay import kept_settings  # noqa: E402
from adasim.real.samples import read_samples  # noqa: E402
from adasim.real.sglang_client import asking, serving, training  # noqa: E402
from adasim.real.sglang_client import backend as backend_file  # noqa: E402
from adasim.real.sglang_client.api import Api  # noqa: E402
from adasim.real.sglang_client.backend import SglangBackend  # noqa: E402
from adasim.real.sglang_client.launching import launch_of  # noqa: E402
from adasim.real.sglang_client.tables import Replay  # noqa: E402
from adasim.real.sglang_plugin import distillation, tap  # noqa: E402
from adasim.real.sglang_plugin.rounds import Prefill, Round  # noqa: E402
from adasim.real.sglang_plugin.settings import ServedOpd, Settings  # noqa: E402
from adasim.real.trainer_process import TrainerProcess  # noqa: E402
from adasim.real.weights import RANDOM  # noqa: E402
from adasim.recorded import check  # noqa: E402
from adasim.recorded import load as load_recorded  # noqa: E402
from adasim.scenario import validate  # noqa: E402
from adasim.types import DraftView, Request  # noqa: E402
from adasim.workload import Closed  # noqa: E402
from tests.build import adasim  # noqa: E402
from tests.fake_trainer import FAKE  # noqa: E402
from tests.sglang_trained_fake import TrainedServer  # noqa: E402

ARCH = replace(RANDOM["random-tiny"], layers=1, qk_norm=True)
SHAPE = DrafterShape(ARCH, (0, 1), 4, 8, 0)
OUT = 12
OPD = {"buffer": 4, "rollback": {"requests": 4, "confidence": 0.6}, "full_verify_share": 0.0}
Served = Callable[..., AbstractContextManager[tuple[TrainedServer, SglangBackend]]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as bytes, and nobody sleeps for long."""
    monkeypatch.setattr(asking, "chat_encoder", lambda target: (lambda text: list(text.encode())[:20], frozenset({2})))
    monkeypatch.setattr(trainer_process, "END_S", 0.2)
    for at in (distillation, tap):
        monkeypatch.setattr(at, "LOOK_S", 0.02)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[TrainerProcess]:
    """All that were started."""
    found: list[TrainerProcess] = []
    real = TrainerProcess.__enter__

    def enter(self: TrainerProcess) -> TrainerProcess:
        found.append(self)
        return real(self)

    monkeypatch.setattr(TrainerProcess, "__enter__", enter)
    return found


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """A target of which only embedding and head are read, and its drafter."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"vocab_size": ARCH.vocab, "max_position_embeddings": 2048}))
    save_file({"model.embed_tokens.weight": torch.zeros(ARCH.vocab, ARCH.hidden)}, target / "model.safetensors")
    save_checkpoint(drafter, Checkpoint(SHAPE, SHAPE.fresh(0)))
    return {"target": str(target), "drafter": str(drafter)}


def fields(models: dict[str, str], **changed: Any) -> dict[str, Any]:
    own = {"kind": "sglang", "device": "cpu", "dtype": "float32", "kv": {"blocks": 4096, "block_tokens": 1}}
    return own | models | {"ignore_eos": True, "max_running_requests": 4} | changed


@pytest.fixture
def served(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Served:
    @contextmanager
    def serve(how: str = "", settings: Settings | None = None, **changed: Any) -> Iterator[Any]:
        monkeypatch.setattr(training, "COMMAND", (sys.executable, "-c", FAKE, how) if how else COMMAND)
        with TrainedServer(SHAPE, SglangBackend.model_validate(fields(models)), settings=settings) as server:
            yield server, SglangBackend.model_validate(fields(models, url=server.url) | changed)

    return serve


def closed(requests: int = 24, **more: Any) -> Closed:
    lengths = {"prompt_len": {"kind": "fixed", "tokens": 20}, "output_len": {"kind": "fixed", "tokens": OUT}}
    given = {"concurrency": 2, "requests": requests, "domains": {"code": 1.0}}
    return Closed.model_validate(lengths | given | more)


def as_it_was(server: TrainedServer, trainers: list[TrainerProcess]) -> None:
    assert server.decider.version == 0
    assert server.tap is None
    assert server.decider.full_verify_share == 0
    for trainer in trainers:
        assert trainer.process is not None
        assert trainer.process.poll() is not None


def test_a_worse_version_is_rolled_back_within_a_run(served: Served, trainers: list[TrainerProcess]) -> None:
    with served("degraded", opd=OPD) as (server, attached):
        server.held = lambda: len(server.versions) < (2 if server.finished < 16 else 3) and server.finished >= 8
        records = attached.run(closed(), Fixed(verify_len=8), 0)
        as_it_was(server, trainers)
        again = attached.model_copy(update={"opd": None}).run(closed(4), Off(), 0)
    events, steps, rounds = records.events, records.steps, records.rounds
    assert check(records, "x") == []
    assert rounds is not None
    assert events["kind"].tolist() == ["trained", "reload", "rollback"]
    assert events["draft_version"].tolist() == [1, 1, 0]
    assert "ALARM: version 1: tau -" in events["detail"].iloc[2]
    assert server.versions == ["0", "1", "0", "0"]  # the last: whatever happened, the server is as it was
    used = rounds["draft_version"].to_numpy()
    assert np.flatnonzero(np.diff(used)).size == 2
    assert (used[0], used[-1]) == (0, 0)
    assert rounds.loc[used == 1, "accepted"].eq(0).all()
    assert rounds.loc[used == 0, "accepted"].gt(0).any()
    for event, old, new in zip(events.to_dict("records")[1:], (0, 1), (1, 0), strict=True):  # on the run's clock
        change = int(np.flatnonzero((steps["draft_version"].shift() == old) & (steps["draft_version"] == new))[0])
        assert steps["end_s"].iloc[change - 1] <= event["time_s"] <= steps["start_s"].iloc[change]
        assert 0 < event["seconds"] < 1
    assert any(n.startswith("distillation: 1 versions") for n in records.notes)
    assert not any("ALARM" in n for n in records.notes)
    assert server.domains == {"code", "None"}
    assert again.events.empty


def test_the_real_trainer_learns_from_what_was_served_and_all_is_kept(
    served: Served, trainers: list[TrainerProcess], tmp_path: Path
) -> None:
    opd = {"buffer": 4, "epochs": 1, "rollback": None, "keep": str(tmp_path / "kept"), "full_verify_share": 0.5}
    step = {"kind": "step", "points": [{"at": 0, "mix": {"code": 1.0}}, {"at": 20, "mix": {"math": 1.0}}]}

    with served(opd=opd) as (server, attached):
        server.held = lambda: server.finished >= 8 and len(server.versions) < 2
        records = attached.run(closed(40, domains=step), Fixed(verify_len=4), 0)
        with pytest.raises(InputError, match=r"backend.opd.keep: .*fixed-verify_len=4--0 exists; use another folder"):
            attached.run(closed(), Fixed(verify_len=4), 0)
        as_it_was(server, trainers)
    kinds = records.events["kind"].tolist()
    assert kinds[:2] == ["trained", "reload"] or kinds[:3] == ["drift", "trained", "reload"]
    assert kinds.count("drift") == 1
    assert (records.events.loc[records.events["kind"] == "trained", "seconds"] > 0).all()
    assert records.events["time_s"].is_monotonic_increasing
    assert records.rounds is not None
    assert records.rounds["draft_version"].iloc[-1] >= 1
    assert records.rounds["whole"].any()
    folder, said = kept_settings(tmp_path / "kept" / "fixed-verify_len=4--0")
    assert said["domains"] == ["default", "code", "math"]
    assert said["opd"]["buffer"] == 4
    assert [s.lesson.text.domain for s in read_samples(folder.buffers / "000001.npz")] == [1] * 4


def test_a_trainer_that_dies_is_told_and_harms_nobody(served: Served, trainers: list[TrainerProcess]) -> None:
    with served("crash", opd=OPD) as (server, attached):
        server.held = lambda: server.finished >= 8 and not trainers[0].failed
        records = attached.run(closed(), Fixed(verify_len=8), 0)
        as_it_was(server, trainers)
    assert records.events["kind"].tolist() == ["trainer_failed"]
    assert any("ALARM: the trainer failed" in n and "out of memory" in n for n in records.notes)
    assert records.requests["status"].eq("finished").all()


def test_a_server_that_keeps_a_trained_drafter_is_told_and_refused_from_then_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served("degraded", opd=OPD | {"rollback": None}) as (server, attached):
        takes_one_version(server, monkeypatch)
        records = attached.run(closed(), Fixed(verify_len=8), 0)
        with pytest.raises(InputError) as caught:
            attached.model_copy(update={"opd": None}).run(closed(), Off(), 0)
    (note,) = [n for n in records.notes if "ALARM" in n]
    assert "not as it was before the run; start it anew: the server began no update: busy" in note
    assert caught.value.problems == ("backend.drafter (its version, 0 = as it was started with): 0, the server has 1",)


def takes_one_version(server: TrainedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives it back no more."""
    real = server.post

    def post(path: str, body: dict[str, Any]) -> Any:
        if server.decider.version == 1:
            server.refuses = {"begin_weight_update": "busy"}
        return real(path, body)

    monkeypatch.setattr(server, "post", post)
    server.held = lambda: server.finished >= 8 and len(server.versions) < 2


def test_a_server_of_ones_own_that_keeps_a_trained_drafter_is_stopped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served("degraded", opd=OPD | {"rollback": None}) as (server, attached):
        takes_one_version(server, monkeypatch)
        own = nullcontext(SimpleNamespace(api=Api(server.url)))
        monkeypatch.setattr(backend_file, "leased", lambda launch: own)
        monkeypatch.setattr(serving, "stop_kept", server._die)
        records = attached.model_copy(update={"url": None}).run(closed(), Fixed(verify_len=8), 0)
        assert server.dead  # the next run has another one
    assert records.requests["status"].eq("finished").all()
    assert not any("ALARM" in n for n in records.notes)


def test_ctrl_c_leaves_the_server_as_it_was(
    served: Served, trainers: list[TrainerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "_in_turns", interrupted)
    with served("hang", opd=OPD) as (server, attached):
        with pytest.raises(KeyboardInterrupt):
            attached.run(closed(), Fixed(verify_len=8), 0)
        as_it_was(server, trainers)
        assert len(trainers) == 1


def test_without_enabled_nothing_is_shown(served: Served, trainers: list[TrainerProcess]) -> None:
    with served("hang", opd=OPD | {"enabled": False}) as (server, attached):
        records = attached.run(closed(4), Fixed(verify_len=8), 0)
        assert server.versions == []
    assert records.events.empty
    assert not trainers
    assert server.domains == {"None"}


def test_one_server_serves_with_and_without(models: dict[str, str]) -> None:
    with_it, without = (SglangBackend.model_validate(fields(models, opd=opd)) for opd in (OPD, None))
    assert launch_of(with_it) == launch_of(without)


def test_servers_that_cannot_are_refused_and_nothing_is_left(
    served: Served, trainers: list[TrainerProcess], tmp_path: Path
) -> None:
    opd = OPD | {"keep": str(tmp_path / "kept")}
    settings = Settings(policy=Off())
    with (
        served(opd=opd, settings=settings) as (server, attached),
        pytest.raises(InputError, match=r'refused: opd: this server takes none; start it with "experiments": true'),
    ):
        attached.run(closed(), Off(), 0)
    with served(opd=opd) as (server, attached):
        server.refuses = {"begin_weight_update": "no"}
        with pytest.raises(InputError, match="the server began no update: no"):
            attached.run(closed(), Off(), 0)
        as_it_was(server, trainers)
        server.show(ServedOpd(folder="/data/opd"))  # somebody else's
        with pytest.raises(InputError, match=r"opd \(where it shows.*: None, the server has /data/opd"):
            attached.run(closed(), Off(), 0)
        assert server.tap is not None
        server.tap.close()
    assert not (tmp_path / "kept").exists()
    assert not trainers


def test_forced_text_teaches_nothing(models: dict[str, str]) -> None:
    config = {
        "name": "mine", "title": "t", "workload": closed().model_dump(mode="json", exclude_none=True),
        "backend": fields(models, opd=OPD, forced={"lengths": [1]}), "policies": [{"kind": "off"}], "seeds": [0],
    }  # fmt: skip
    with pytest.raises(InputError, match="opd and forced exclude each other"):
        validate(config)
    assert SglangBackend.model_validate(fields(models, opd=OPD)).forced_fields(1, prefill=False)["opd"] is None


@pytest.mark.parametrize(("policy", "asked"), [(Threshold(), True), (Fixed(verify_len=8), False)])
def test_confidences_are_recorded_where_a_policy_asked(policy: Policy, asked: bool, served: Served) -> None:
    """The made-up drafter says 0.5 of every position: of 7 drafts 3.5."""
    with served() as (_, attached):
        records = attached.run(closed(4), policy, 0)
    assert records.rounds is not None
    assert records.rounds["draft_len"].eq(7).all()
    if asked:
        assert records.rounds["confidence"].eq(3.5).all()
    else:
        assert records.rounds["confidence"].isna().all()


def test_confidence_counts_what_was_drafted() -> None:
    view = DraftView(np.array([2, 0, 3]), survival=np.array([[0.9, 0.5, 0.4]] * 3))
    assert view.confidence == pytest.approx([1.4, 0.0, 1.8])
    assert DraftView(np.array([2])).confidence is None


def test_an_alarm_tells_when_tau_moved() -> None:
    """Forty requests, one after the other, that accept 2 or 3 drafts a round; then forty that accept none."""
    requests = [Request(i, 0, 4, 9) for i in range(80)]
    alarm = Alarm(false_alarm_requests=500, watch="all")
    found = Replay(requests, ["code"], 8, 16, 0.0, alarm)
    found.sent({i: float(i) for i in range(80)}, dict.fromkeys(range(80), 9))
    step = 0
    for i in range(80):
        found.play(Prefill(step, i, i + 0.1, 0, [i], [4], [4]), {i: i})
        lucks = ([2, 3, 0] if i % 2 else [3, 3, 0]) if i < 40 else [0] * 8
        for j, luck in enumerate(lucks):
            step += 1
            at, version = i + 0.1 * (j + 1), int(i >= 40)
            found.play(Round(step, at, at + 0.1, 0.0, 0.1, 0, [i], [5], [7], [8], [luck], None, 0, version), {i: i})
        step += 1
    watch, *alarms = found.records().events.to_dict("records")
    assert watch["kind"] == "watch"
    assert [a["kind"] for a in alarms[:1]] == ["alarm"]
    assert alarms[0]["detail"] == "tau fell"
    assert alarms[0]["draft_version"] == 1
    assert 40 < alarms[0]["finished"] < 60
    assert alarms[0]["time_s"] in set(found.lives.finish_s)


def test_a_scenario_compares_with_and_without(served: Served, tmp_path: Path) -> None:
    """``adasim record`` as users call it: one server for both arms."""
    with served("degraded") as (server, attached):
        server.held = lambda: server.tap is not None and server.tap.sent > 0 and len(server.versions) < 2
        config = {
            "name": "mine", "title": "t", "workload": closed(24).model_dump(mode="json", exclude_none=True),
            "backend": attached.model_dump(mode="json", exclude_none=True) | {"opd": OPD | {"rollback": None}},
            "policies": [{"kind": "fixed", "verify_len": 8}], "sweep": {"backend.opd.enabled": [False, True]},
            "seeds": [0], "measure": {"warmup_requests": 0},
        }  # fmt: skip
        path = tmp_path / "mine.yaml"
        path.write_text(json.dumps(config))
        assert adasim("record", path, "--out", tmp_path / "out") == 0
    assert server.versions[:2] == ["0", "1"]
    found = load_recorded(tmp_path / "out")
    kinds = {t.backend["opd"]["enabled"]: t.records.events["kind"].tolist() for t in found.trials}
    assert kinds[False] == []
    assert kinds[True][:2] == ["trained", "reload"]
    assert "distillation: 1 versions" in (tmp_path / "out" / "report.md").read_text()
