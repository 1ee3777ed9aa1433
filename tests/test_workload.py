"""Arrivals, lengths, domains and traces."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from adasim.errors import InputError
from adasim.lengths import FixedLength
from adasim.traces import read_trace
from adasim.workload import AnyWorkload, Bursty, Closed, Poisson, Trace
from tests.build import SHARED

WORKLOAD: TypeAdapter[Any] = TypeAdapter(AnyWorkload)


def test_poisson_and_bursty_gaps() -> None:
    for workload, cv in (
        (Poisson(rate_rps=5.0, requests=20_000), 1.0),
        (Bursty(rate_rps=5.0, cv=2.5, requests=20_000), 2.5),
    ):
        gaps = np.diff([r.arrival_s for r in workload.generate(0)])
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_lengths_have_the_mean_and_spread_asked_for() -> None:
    length = {"kind": "lognormal", "mean": 500.0, "cv": 0.5, "maximum": 100_000}
    workload = WORKLOAD.validate_python({"kind": "closed", "concurrency": 2, "requests": 20_000, "output_len": length})
    lengths = np.array([r.output_len for r in workload.generate(1)])
    assert lengths.mean() == pytest.approx(500, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.05)


def test_changing_one_thing_keeps_the_others() -> None:
    """Arrivals, prompts, outputs and domains come from streams of their own."""
    mix = {"a": 1.0, "b": 1.0}
    one = Poisson(rate_rps=5.0, requests=50, domains=mix).generate(3)
    other = Poisson(rate_rps=5.0, requests=50, domains=mix, prompt_len=FixedLength(tokens=7)).generate(3)
    assert [(r.arrival_s, r.domain, r.output_len) for r in one] == [(r.arrival_s, r.domain, r.output_len) for r in other]


def test_requests_per_client() -> None:
    assert len(Closed(concurrency=3, requests_per_client=5).generate(0)) == 15
    with pytest.raises(ValidationError, match="not both"):
        Closed(concurrency=3, requests_per_client=5, requests=7)


def shares(drift: dict[str, Any], n: int = 9000) -> np.ndarray:
    workload = WORKLOAD.validate_python({"kind": "closed", "concurrency": 1, "requests": n, "domains": drift})
    domain = np.array([r.domain for r in workload.generate(0)])
    return np.array([(part == 1).mean() for part in np.array_split(domain, 9)])


A, B = {"a": 1.0}, {"b": 2.0}


def test_step_drift() -> None:
    points = [{"at": 0, "mix": A}, {"at": 3000, "mix": B}, {"at": 6000, "mix": A}]
    assert shares({"kind": "step", "points": points}) == pytest.approx([0] * 3 + [1] * 3 + [0] * 3)


def test_ramp_drift() -> None:
    points = [{"at": 0, "mix": A}, {"at": 9000, "mix": B}]
    assert shares({"kind": "ramp", "points": points}) == pytest.approx((np.arange(9) + 0.5) / 9, abs=0.05)


def test_periodic_drift() -> None:
    points = [{"at": 0, "mix": A}, {"at": 1, "mix": B}]
    assert shares({"kind": "periodic", "points": points, "period": 2000.0}) == pytest.approx(0.5, abs=0.1)
    at_period = shares({"kind": "periodic", "points": points, "period": 9000.0})
    assert at_period[0] < 0.1
    assert at_period[4] > 0.9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"domains": {"a": 0.0}}, "must not all be 0"),
        ({"domains": {"a": -1.0}}, "greater than or equal to 0"),
        ({"domains": {"kind": "step", "points": [{"at": 0, "mix": A}]}}, "at least 2"),
        (
            {"domains": {"kind": "step", "points": [{"at": 5, "mix": A}, {"at": 0, "mix": B}]}},
            "at must rise",
        ),
        (
            {"domains": {"kind": "ramp", "points": [{"at": 0, "mix": A}, {"at": 1, "mix": B}], "period": 3.0}},
            "period belongs to periodic",
        ),
        ({"concurrency": 0}, "greater than or equal to 1"),
        ({"concurrency": True}, "valid integer"),
        ({"concurrency": "4"}, "valid integer"),
        ({"prompt_len": {"kind": "uniform", "minimum": 5, "maximum": 4}}, "maximum is below minimum"),
        ({"output_len": {"kind": "lognormal", "mean": float("nan"), "cv": 1.0}}, "finite number"),
    ],
)
def test_bad_workloads_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WORKLOAD.validate_python({"kind": "closed", "concurrency": 1} | fields)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n10.5,100,20\n12.0,50,5\n"
MOONCAKE = [
    {"timestamp": 100, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 1600, "input_length": 1024, "output_length": 3, "hash_ids": [46, 47]},
]


def trace_file(tmp_path: Path, text: str, name: str = "trace.csv") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_traces_of_three_forms(tmp_path: Path) -> None:
    azure = read_trace(trace_file(tmp_path, AZURE, "a.csv"))
    assert azure[0] == (0.0, 4808, 10, ())
    assert azure[1][0] == pytest.approx(0.052)
    assert azure[1][1:] == (3180, 8, ())
    vidur = read_trace(trace_file(tmp_path, VIDUR, "v.csv"))
    assert vidur == [(0.0, 100, 20, ()), (1.5, 50, 5, ())]
    mooncake = read_trace(trace_file(tmp_path, "\n".join(map(json.dumps, MOONCAKE)), "m.jsonl"))
    # only full 512-token blocks are shared: the third block of the first prompt is partly filled
    assert mooncake == [(0.0, 1100, 52, (46, 47)), (1.5, 1024, 3, (46, 47))]


def test_azure_times_of_other_years(tmp_path: Path) -> None:
    """A byte-order mark, a zone, and more than six digits are fine."""
    header, first, second = AZURE.splitlines()
    text = "\ufeff" + "\n".join([header, first, second.replace("18:17:04.0319600", "18:17:05.979960012+00:00")])
    assert read_trace(trace_file(tmp_path, text))[1].arrival_s == pytest.approx(2.0)


def test_trace_workload(tmp_path: Path) -> None:
    path = trace_file(tmp_path, VIDUR)
    requests = Trace(path=path, speed=3.0).generate(0)
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in requests] == [(0.0, 100, 20), (0.5, 50, 5)]
    assert len(Trace(path=path, limit=1).generate(0)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("3180", "many"), "line 3: 'many' is not a token count"),
        (AZURE.replace("3180", "31.5"), "line 3: "),
        (AZURE.replace("18:17:04", "18:16:04"), "line 3: arrives before the line above it"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "yesterday"), "line 3: 'yesterday' is not a time like"),
        (AZURE.replace(",8\n", "\n"), "line 3: None is not a token count"),
        (AZURE.replace(",8\n", ",0\n"), "line 3: no prompt or no output tokens; set workload.skip_empty"),
        (AZURE.replace(",8\n", ",-8\n"), "line 3: '-8' is not a token count"),
        (AZURE.splitlines()[0] + "\n", "holds no request"),
        ("", r"line 1: columns \(none\); expected azure"),
        ("a,b\n1,2\n", "line 1: columns a,b; expected azure: TIMESTAMP"),
        (VIDUR.replace("12.0", "nan"), "line 3: arrival nan must be a number"),
        (VIDUR.replace("12.0", "noon"), "line 3: 'noon' is not a number of seconds"),
        (AZURE.replace(",8\n", ",8,9\n"), "line 3: more fields than the header has"),
        ('"' + "x" * 200_000, "cannot be read as a trace: field larger than field limit"),
    ],
)
def test_bad_trace_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Trace(path=trace_file(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: not a JSON object"),
        (json.dumps({"timestamp": 200, "input_length": 10}), "line 2: 'output_length' is missing"),
        (json.dumps(MOONCAKE[1] | {"hash_ids": [1, 2, 3, 4]}), "line 2: 4 hash_ids for 1024 tokens"),
        (json.dumps(MOONCAKE[1] | {"hash_ids": "x"}), "line 2: hash_ids must be a list"),
        ('{"timestamp": 1, "input_length": 1e999, "output_length": 1}', "line 2: inf is not a token count"),
    ],
)
def test_bad_mooncake_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Trace(path=trace_file(tmp_path, json.dumps(MOONCAKE[0]) + "\n" + line, "m.jsonl"))


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:17:05.0,x,1\n2023-11-16 18:17:06.0,1,y\n"
    with pytest.raises(InputError) as error:
        read_trace(trace_file(tmp_path, text))
    assert [p.split(": ")[1] for p in error.value.problems] == ["line 4", "line 5"]


def test_skip_empty(tmp_path: Path) -> None:
    path = trace_file(tmp_path, AZURE.replace(",8\n", ",0\n"))
    assert len(Trace(path=path, skip_empty=True).generate(0)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "AzureLLMInferenceTrace_conv_2023_first5k.csv",
        "AzureLLMInferenceTrace_code_2023_first5k.csv",
        "mooncake_conversation_trace_first5k.jsonl",
        "mooncake_synthetic_trace_first5k.jsonl",
    ],
)
def test_public_traces_are_read(name: str) -> None:
    path = SHARED / "data" / "traces" / name
    if not path.is_file():
        pytest.skip("the public traces are not at hand")
    rows = read_trace(str(path))
    assert len(rows) > 3900
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))
