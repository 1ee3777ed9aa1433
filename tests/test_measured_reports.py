"""What was measured and lies in reports/ is still predicted as well as when it was published."""

import json
from pathlib import Path

import pandas as pd
import pytest

from adasim.errors import InputError
from tests.build import adasim

REPORTS = Path(__file__).parents[1] / "reports"


def test_sglang_on_a_cpu_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 cells that the profile has not seen: 2.8 % when they were published, the worst 6.9 %."""
    weights = pytest.importorskip("adasim.real.weights")
    try:
        weights.model_dir("smollm2-135m")
    except InputError as error:
        pytest.skip(f"prompts need a tokenizer: {error}")
    folder = REPORTS / "sglang_cpu"
    given = ["--profile", folder / "sglang_cpu.yaml", "--records", folder / "run", "--out", tmp_path / "out", "--json"]
    assert adasim("validate", "sglang_cpu", *given) == 0
    assert json.loads(capsys.readouterr().out)
    bars = pd.read_csv(tmp_path / "out" / "tables" / "bars.csv")
    assert set(bars["verdict"]) == {"met"}
    found = dict(zip(bars["limit"], bars["found"].astype(float), strict=True))
    assert found["throughput over plain decoding, mean error"] < 0.033
    assert found["throughput over plain decoding, worst cell"] < 0.08
    assert found["tau, mean error"] < 0.06
    assert found["pairs of policies in the wrong order"] == 0
