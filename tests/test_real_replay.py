"""Replaying kept buffers under other settings gives what the run's own trainer made, and judges by the unseen."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from adasim.cli import app  # noqa: E402
from adasim.errors import InputError  # noqa: E402
from adasim.real.opd import Opd  # noqa: E402
from adasim.real.opd_process import Folder  # noqa: E402
from adasim.real.replay import replay  # noqa: E402
from adasim.real.samples import write_samples  # noqa: E402
from adasim.real.sampling import Sampling  # noqa: E402
from adasim.real.weights import random_target  # noqa: E402
from tests.test_real_engine import ARCH, BLOCK  # noqa: E402
from tests.test_real_opd import collect, fresh  # noqa: E402

OPD = Opd(epochs=10, rate=3e-3, positions="text")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept")
    target = random_target(ARCH, seed=1, gain=0.02)
    Folder(root).prepare(OPD, Sampling(), fresh(), target.embedding, target.head_weight, "random-tiny", ["default"])
    samples = collect(target, BLOCK, 16)
    for number, part in enumerate((samples[:8], samples[8:], samples[:8]), 1):  # the last buffer's traffic is known
        write_samples(root / "buffers" / f"{number:06d}.npz", part)
    return root


def test_versions_are_judged_on_the_buffers_held_out(kept: Path) -> None:
    tried = list(replay(kept, OPD))
    assert [t.buffer for t in tried] == [0, 1, 2]
    assert tried[0].progress is None
    assert tried[2].tau["default"].tau > tried[0].tau["default"].tau + 0.05


def test_settings_can_be_changed(kept: Path) -> None:
    result = CliRunner().invoke(
        app, ["train", "opd", str(kept), "--set", "loss={kind: forward_kl}", "--set", "epochs=1", "--json", "--hold", "2"]
    )
    assert result.exit_code == 0, result.output
    decoder, documents, text = json.JSONDecoder(), [], result.stdout.strip()
    while text:
        document, end = decoder.raw_decode(text)
        documents.append(document)
        text = text[end:].strip()
    assert [d["buffer"] for d in documents] == [0, 1]
    assert len(documents[1]["progress"]["losses"]) == 1


def test_bad_input_is_named_all_at_once(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 buffers; at least 4 are needed to hold out 3"):
        list(replay(kept, OPD, hold=3))
    with pytest.raises(InputError, match="only a run with it keeps that"):
        list(replay(kept, OPD.model_copy(update={"positions": "all"})))
    with pytest.raises(InputError, match="holds no settings"):
        list(replay(tmp_path, OPD))
    sampled = tmp_path / "sampled"
    shutil.copytree(kept, sampled)
    said = json.loads((kept / "settings.json").read_text()) | {"sampling": {"temperature": 0.7, "top_p": 1.0}}
    (sampled / "settings.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match="only greedy text"):
        list(replay(sampled, OPD))
    result = CliRunner().invoke(app, ["train", "opd", str(kept), "--set", "epochs=0", "--set", "los=1"])
    assert isinstance(result.exception, InputError)
    assert len(result.exception.problems) == 2
