"""The torch backend runs the simulator's scenarios' parts on a real engine, without a model hub."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from adasim.calibration.alarm import Alarm  # noqa: E402
from adasim.calibration.rollback import Rollback  # noqa: E402
from adasim.calibration.roofline import RooflineCost  # noqa: E402
from adasim.errors import InputError  # noqa: E402
from adasim.lengths import FixedLength  # noqa: E402
from adasim.policies.dspark import DSpark  # noqa: E402
from adasim.policies.fixed import Fixed  # noqa: E402
from adasim.policies.head import Head  # noqa: E402
from adasim.policies.off import Off  # noqa: E402
from adasim.policies.scheduler import ShortestPredicted  # noqa: E402
from adasim.policies.smartspec import SmartSpec  # noqa: E402
from adasim.policies.vllm_adaptive import VllmAdaptive  # noqa: E402
from adasim.real.backend import TorchBackend  # noqa: E402
from adasim.real.checkpoint import Checkpoint, save_checkpoint  # noqa: E402
from adasim.real.distiller import Distiller  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.engine import Engine  # noqa: E402
from adasim.real.length_head import make_head  # noqa: E402
from adasim.real.opd import Opd  # noqa: E402
from adasim.real.sampling import Forced  # noqa: E402
from adasim.real.texts import read_prompts  # noqa: E402
from adasim.real.weights import RANDOM  # noqa: E402
from adasim.workload import Closed, Drift, DriftPoint, Poisson  # noqa: E402


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    arch = RANDOM["random-tiny"]
    shape = DrafterShape(replace(arch, layers=1, qk_norm=True), (0, 2), arch.layers, 8, 0)
    head = dict(make_head("paper", arch.hidden).state_dict())
    save_checkpoint(folder, Checkpoint(shape, shape.fresh(0), torch.arange(0, arch.vocab, 2), head))
    return folder


def workload(requests: int = 6) -> Closed:
    return Closed(concurrency=3, requests=requests, output_len=FixedLength(tokens=12), domains={"chat": 0.5, "math": 0.5})


def test_speculation_gives_the_text_of_plain_decoding(drafter: Path) -> None:
    plain = TorchBackend(target="random-tiny", dtype="float32")
    fast = TorchBackend(target="random-tiny", dtype="float32", drafter=str(drafter))
    records, expected = plain.serve(workload(), Off(), seed=1)
    assert (records.requests["tokens"] == 12).all()
    assert set(records.requests["domain"]) == {"chat", "math"}
    for policy in (Fixed(verify_len=8), Head()):
        records, texts = fast.serve(workload(), policy, seed=1)
        assert texts == expected
        assert (records.requests["status"] == "finished").all()


def test_every_round_is_recorded(drafter: Path) -> None:
    fast = TorchBackend(target="random-tiny", dtype="float32", drafter=str(drafter))
    records = fast.run(workload(), Head(), seed=1)
    rounds = records.rounds
    assert rounds is not None
    assert len(rounds) == records.requests["rounds"].sum()
    decided = rounds["accept_len"].round().clip(1, rounds["draft_len"] + 1)
    assert (rounds["verify_len"] == decided).all()
    for _, mine in rounds.groupby("request"):
        assert (mine["position"].diff().iloc[1:] == mine["accepted"].to_numpy()[:-1] + 1).all()


def test_policies_that_ask_for_time_run_with_a_cost_model(drafter: Path) -> None:
    fast = TorchBackend(target="random-tiny", dtype="float32", drafter=str(drafter), cost=RooflineCost())
    expected = TorchBackend(target="random-tiny", dtype="float32").serve(workload(), Off(), seed=1)[1]
    for policy in (SmartSpec(), DSpark(), VllmAdaptive(interval=2, warmup_refits=1)):
        assert fast.serve(workload(), policy, seed=1)[1] == expected


def test_open_arrivals_wait_for_the_clock() -> None:
    backend = TorchBackend(target="random-tiny", dtype="float32")
    arrivals = Poisson(rate_rps=50.0, requests=5, output_len=FixedLength(tokens=3), domains={"code": 1.0})
    requests = backend.run(arrivals, Off(), seed=0).requests
    asked = [r.arrival_s for r in arrivals.generate(0)]
    assert all(a >= b for a, b in zip(requests["arrival_s"], asked, strict=True))
    assert (requests["first_token_s"] > requests["arrival_s"]).all()


def test_forced_acceptance_is_marked(drafter: Path) -> None:
    backend = TorchBackend(target="random-tiny", drafter=str(drafter), forced=Forced(lengths=[3]))
    records = backend.run(workload(), Fixed(verify_len=8), seed=0)
    assert any("forced" in note for note in records.notes)


def test_what_cannot_run_is_refused(drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="accept_len"):
        TorchBackend(target="random-tiny").check_policy(Head())
    with pytest.raises(InputError, match="smartspec needs cost; the engine provides accept_len, margin, survival"):
        TorchBackend(target="random-tiny", drafter=str(drafter)).check_policy(SmartSpec())
    with pytest.raises(InputError, match="scheduler shortest needs predicted_len"):
        TorchBackend(target="random-tiny", scheduler=ShortestPredicted()).check_workload(workload(), 0)
    with pytest.raises(InputError, match="takes 8192 in all"):
        TorchBackend(target="random-tiny").run(
            Closed(concurrency=1, requests=1, output_len=FixedLength(tokens=9000), domains={"chat": 1.0}), Off(), 0
        )
    config = json.loads((drafter / "config.json").read_text()) | {"num_target_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match="made for a target of 30 layers of width 64; random-tiny has 4 layers"):
        TorchBackend(target="random-tiny", drafter=str(tmp_path)).run(workload(), Fixed(verify_len=2), 0)
    with pytest.raises(InputError, match="no prompts for poetry"):
        TorchBackend(target="random-tiny").check_workload(Closed(concurrency=1, requests=1, domains={"poetry": 1.0}), 0)


def test_packaged_prompts_are_fifty_a_domain() -> None:
    assert {d: len(p) for d, p in read_prompts(None).items()} == {"chat": 50, "code": 50, "math": 50}


def test_importing_the_backend_loads_no_torch() -> None:
    code = "import sys, adasim.real.backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_distillation_runs_beside_serving_and_keeps_its_versions(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TorchBackend(target="random-tiny", dtype="float32")
    _, expected = plain.serve(workload(requests=40), Off(), seed=0)
    opd = Opd(buffer=8, epochs=1, teacher="rerun", rollback=Rollback(requests=8), keep=str(tmp_path / "kept"))
    backend = TorchBackend(target="random-tiny", dtype="float32", drafter=str(drafter), opd=opd)
    poll = Distiller.poll

    def patient(distiller: Distiller, engine: Engine) -> None:
        poll(distiller, engine)
        while not distiller.idle and not distiller.trainer.failed:
            time.sleep(0.05)
            poll(distiller, engine)

    monkeypatch.setattr(Distiller, "poll", patient)
    records, texts = backend.serve(workload(requests=40), Head(), seed=0)
    assert texts == expected
    reloads = records.events[records.events["kind"] == "reload"]
    assert reloads["draft_version"].iloc[0] >= 1
    assert records.steps["draft_version"].iloc[-1] >= 1
    assert any(note.startswith("distillation:") for note in records.notes)
    assert not any("ALARM" in note for note in records.notes)
    (run,) = (tmp_path / "kept").iterdir()
    assert run.name == "head-0"
    assert (run / "buffers" / "000001.npz").exists()
    with pytest.raises(InputError, match="exists; use another folder"):
        backend.serve(workload(), Head(), seed=0)


@pytest.mark.parametrize("fields", [{}, {"drafter": "d", "forced": Forced(lengths=[1])}])
def test_distillation_needs_a_drafter_and_real_acceptance(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="opd"):
        TorchBackend(target="random-tiny", opd=Opd(), **fields)


def test_an_alarm_watches_tau_and_the_shift_is_on_record(drafter: Path) -> None:
    shift = Drift(kind="step", points=[DriftPoint(at=0, mix={"code": 1.0}), DriftPoint(at=6, mix={"chat": 1.0})])
    load = Closed(concurrency=3, requests=12, output_len=FixedLength(tokens=12), domains=shift)
    backend = TorchBackend(target="random-tiny", dtype="float32", drafter=str(drafter), alarm=Alarm())
    records = backend.run(load, Head(), 0)
    assert records.events["kind"].tolist() == ["watch", "drift"]
    drift = records.events.iloc[1]
    assert drift["detail"] == "mix chat 1"
    assert drift["time_s"] == records.requests["arrival_s"].iloc[6]


def test_identity_names_engine_and_models(drafter: Path) -> None:
    backend = TorchBackend(target="random-tiny", dtype="float32", drafter=str(drafter), threads=2)
    mine = backend.identity()
    assert (mine.engine, mine.engine_version, mine.dtype, mine.threads) == ("torch", torch.__version__, "float32", 2)
    assert mine.hardware
    assert mine.drafter_sha256 is not None
    plain = backend.model_copy(update={"drafter": None}).identity()
    assert [line.split(":")[0] for line in mine.differs(plain)] == ["drafter", "drafter_sha256"]
    other = backend.model_copy(update={"target": "random-smollm2-135m"}).identity()
    assert [line.split(":")[0] for line in mine.differs(other)] == ["target", "target_sha256"]
