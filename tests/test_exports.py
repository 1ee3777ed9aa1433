"""Exports: the lengths are right by hand, files load back, and what cannot be exported is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from adasim import metrics
from adasim.calibration.cost import TableCost
from adasim.calibration.formula import FormulaCost
from adasim.errors import InputError
from adasim.exports import sglang, sps, vllm
from adasim.exports.best_k import Range, Rates, ranges, rates, tokens_per_round
from adasim.exports.export import read_best_k
from adasim.exports.formats import Wanted, lengths, make
from adasim.exports.source import Asked, Source, read_source, traffic
from adasim.importers.registry import import_files
from adasim.importers.sink import Sink
from adasim.policies.fixed import Fixed
from adasim.policies.schedule import Schedule
from adasim.real.sglang_plugin.settings import parse_settings, read_settings
from adasim.scenario import validate
from tests.build import adasim, backend, closed, config, simulate

HALF = np.array([[0.5, 0.25]])
TEN = FormulaCost(base_ms=10, per_token_ms=1)
EAGLE: dict[str, Any] = {
    "kind": "formula",
    "base_ms": 10,
    "per_token_ms": 1,
    "draft": {"kind": "linear", "base_ms": 0.1, "autoregressive": True},
    "fitted_tokens": [1, 512],
    "extrapolate": True,
}
MIXED = {"easy": {"kind": "geometric", "alpha": 0.9}, "hard": {"kind": "geometric", "alpha": 0.3}}


def run(*arguments: object) -> int:
    return adasim("export", *arguments)


def written(folder: Path, **fields: Any) -> str:
    """A scenario file."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config(**fields)))
    return str(path)


def eagle(folder: Path, *, max_batch: int = 64) -> Source:
    mixed = {"kind": "curves", "curves": MIXED}
    engine = backend(cost=EAGLE, acceptance=mixed, max_draft_len=7, max_running_requests=max_batch)
    traffic = closed(domains={"easy": 1, "hard": 1})
    return read_source(written(folder, workload=traffic, backend=engine), Asked())


def test_tokens_of_a_round_are_pooled() -> None:
    assert tokens_per_round(HALF, np.ones(1)) == pytest.approx([1, 1.5, 1.75])
    both = np.array([[0.5], [0.0]])  # 1.5 and 1 tokens a round: 200 tokens of each take 133.3 + 200 rounds
    assert tokens_per_round(both, np.array([0.5, 0.5])) == pytest.approx([1, 400 / (200 / 1.5 + 200)])


def test_rates_and_where_speculation_stops_paying() -> None:
    """Rounds take 10 + n (k + 1) ms: k = 0 and 1 meet where 1 / (10 + n) = 1.5 / (10 + 2 n), at n = 10."""
    found = {r.batch: r for r in rates(TEN, np.array([1, 1.5, 1.75]), [1, 10, 100], 64.0)}
    assert found[1].tok_s == pytest.approx([1e3 / 11, 1500 / 12, 1750 / 13])
    assert found[1].k == 2
    assert found[1].gain == pytest.approx((1750 / 13) / (1e3 / 11) - 1)
    assert found[10].tok_s[0] == pytest.approx(found[10].tok_s[1])
    assert (found[100].k, found[100].gain) == (0, 0.0)


def test_full_blocks_cost_their_drafts() -> None:
    cost = TEN.model_copy(update={"draft": TEN.draft.model_copy(update={"per_position_ms": 1.0})})
    part, full = (rates(cost, np.array([1, 1.5, 1.75]), [2], 64.0, draft_block=b)[0].tok_s for b in (False, True))
    assert part == pytest.approx([2e3 / 12, 3e3 / (14 + 4), 3.5e3 / (16 + 6)])
    assert full == pytest.approx([2e3 / 12, 3e3 / (14 + 6), 3.5e3 / (16 + 6)])


def test_lengths_outside_the_measured_range_are_left_out() -> None:
    cost = TableCost.model_validate(
        {"points": [{"batch": b, "tokens_per_request": t, "ms": 10} for b in (2, 4) for t in (2.0, 3.0)]}
    )
    found = rates(cost, np.array([1, 1.5, 1.75, 1.9]), range(1, 9), 64.0)
    assert [r.batch for r in found] == [2, 3, 4]
    assert np.isnan(found[0].tok_s).tolist() == [True, False, False, True]
    assert np.isnan(found[0].gain)  # plain decoding was not measured


def test_a_range_is_kept_while_its_length_is_as_good_as_the_best() -> None:
    lines = {2: [1.0, 2.0], 3: [1.995, 2.0], 4: [2.0, 1.985], 5: [2.0, 1.9], 9: [2.0, 1.9]}
    found = [Rates(n, np.array(t)) for n, t in lines.items()]
    assert ranges(found) == [Range(1, 4, 1), Range(5, 9, 0)]
    assert ranges(found, alike=0.0) == [Range(1, 3, 1), Range(4, 9, 0)]


@pytest.mark.parametrize("batch", [2, 8])
def test_the_formula_is_what_the_simulator_does(batch: int) -> None:
    """Where nothing else happens: independent luck, no prefill, batches that stay full."""
    engine = backend(cost={"kind": "formula", "base_ms": 10, "per_token_ms": 1})
    records = simulate(
        Fixed(verify_len=4),
        backend=engine,
        workload=closed(
            concurrency=batch, requests=200 * batch, drain=False, output_len={"kind": "fixed", "tokens": 400}
        ),
    )
    part = metrics.window(records, batch, open_loop=False, until_last_arrival=True)
    expected = rates(TEN, tokens_per_round(np.array([[0.8, 0.64, 0.512]]), np.ones(1)), [batch], 64.0)[0].tok_s[3]
    assert metrics.output_tok_s(records, part) == pytest.approx(expected, rel=0.02)


def test_traffic_of_a_scenario() -> None:
    """Two thirds of 300 tokens are code's; a token of 60 + 90 sees 105 tokens on average, wherever it stands."""
    scenario = validate(config(workload=closed(requests=4000, prompt_len={"kind": "fixed", "tokens": 60},
                                               output_len={"kind": "fixed", "tokens": 90},
                                               domains={"code": 2, "chat": 1}),
                               backend=backend(acceptance={"kind": "curves", "curves": {
                                   "code": MIXED["easy"], "chat": MIXED["hard"]}})))  # fmt: skip
    shares, context = traffic(scenario.workload, 0)
    assert shares["code"] == pytest.approx(2 / 3, abs=0.03)
    assert context == pytest.approx(105)


def test_contexts_harden_the_curve(tmp_path: Path) -> None:
    soft = {
        "kind": "curves",
        "curves": {"default": {"kind": "geometric", "alpha": 0.8}},
        "tau_by_context": {1: 1, 1001: 0.5},
    }
    name = written(tmp_path, backend=backend(acceptance=soft, max_draft_len=4))
    near, far = (1 + read_source(name, Asked(context=c)).curve("default").sum() for c in (1.0, 501.0))
    assert far == pytest.approx(0.75 * near)
    with pytest.raises(InputError, match=r"--context 2000: acceptance is known for 1\.\.1001"):
        read_source(name, Asked(context=2000.0))


def test_vllm_schedule(tmp_path: Path) -> None:
    source = eagle(tmp_path)
    export = vllm.export(source, lengths(source), "some/drafter")
    (text, _), names = export.documents.values(), list(export.documents)
    assert names == ["vllm_speculative_config.json", "vllm_speculative_config.about.json"]
    config_ = vllm.check(text, "mine")
    assert (config_.method, config_.model) == ("eagle3", "some/drafter")
    best = {r.batch: r for r in source.rates()}
    for batch in (1, 7, 20, 64):
        chosen = best[batch].tok_s[config_.drafts(batch)]
        assert chosen >= 0.99 * best[batch].best_tok_s
    assert config_.drafts(1) > config_.drafts(64)
    assert config_.drafts(1000) == config_.drafts(64)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ([[2, 8, 3]], "must start at 1, it starts at 2"),
        ([[1, 8, 3], [8, 16, 1]], r"\[8, 16, 1\]: overlaps the range before"),
        ([[1, 8, 4]], "k exceeds num_speculative_tokens 3"),
        ([[1, 8, -1]], "greater than or equal to 0"),
        ([[4, 1, 2]], "ends before it starts"),
        ([[1, 8]], "num_speculative_tokens_per_batch_size"),
        ([], "at least 1 item"),
    ],
)
def test_vllm_refuses(schedule: list[list[int]], says: str) -> None:
    whole = {"method": "eagle", "model": "m", "num_speculative_tokens": 3}
    with pytest.raises(InputError, match=says):
        vllm.check(json.dumps(whole | {"num_speculative_tokens_per_batch_size": schedule}), "mine")


def test_sglang_candidates_are_what_a_domain_wants(tmp_path: Path) -> None:
    source = eagle(tmp_path)
    export = sglang.export(source, lengths(source), "some/drafter")
    assert export.content is not None
    first = export.content["1"]["candidate_steps"]
    easy, hard = (source.rates(domain=d)[0].k for d in ("easy", "hard"))
    assert hard < easy
    assert {easy, hard} <= set(first)
    assert "--speculative-adaptive" in export.flags
    document = json.loads(export.documents["sglang_adaptive.json"])
    assert document["about"]["traffic"]["domains"] == {
        "easy": pytest.approx(0.5, abs=0.2),
        "hard": pytest.approx(0.5, abs=0.2),
    }


def test_lengths_of_a_tier() -> None:
    found = [Range(1, 4, 7), Range(5, 9, 3)]
    assert sglang.within(found, Range(1, 3, 5)) == [7]
    assert sglang.within(found, Range(4, 6, 5)) == [7, 3]
    assert sglang.within(found, Range(20, 30, 0)) == [3]


def test_sps_table_is_read_back_by_the_importer(tmp_path: Path) -> None:
    """An additive cost is told exactly, and what adasim imports is what it exported."""
    source = eagle(tmp_path, max_batch=16)
    path = sps.export(source).write(tmp_path)[0]
    assert [p.name for p in tmp_path.glob("sps*")] == ["sps_table.json"]  # what must be known is inside
    sink = Sink()
    import_files([path], sink)
    for row in sink.costs:
        assert row.batch is not None
        assert row.tokens is not None
        if row.tokens <= 8 * row.batch:
            step = source.cost.step(row.batch, 8 * row.batch, row.tokens, 64, longest_draft=7, reads_head=True)
            assert row.ms == pytest.approx(1e3 * step.total)
    assert json.loads(path.read_text())["bias_seconds"] > 0


def test_adaflash_settings_are_those_a_server_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADASIM_POLICY", raising=False)
    name = written(tmp_path, policies=[{"kind": "off"}, {"kind": "dcut", "name": "cut"}, {"kind": "oracle"}])
    assert run(name, "--to", "adaflash", "--out", tmp_path / "a") == 0
    found = read_settings(str(tmp_path / "a"))
    assert isinstance(found.policy, Schedule)
    assert found.policy.draft_block
    assert found.policy.drafts[1] == read_source(name, Asked()).rates(draft_block=True)[0].k
    assert run(name, "--to", "adaflash", "--policy", "cut", "--out", tmp_path / "b") == 0
    cut = read_settings(str(tmp_path / "b"))
    assert cut.policy.kind == "dcut"
    assert cut.cost is not None
    assert cut.cost.round_s(4, 64, 32, 100.0) == read_source(name, Asked()).cost.round_s(4, 64, 32, 100.0)


def test_an_oracle_cannot_be_deployed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path, policies=[{"kind": "off"}, {"kind": "oracle"}])
    assert run(name, "--to", "adaflash", "--policy", "oracle", "--out", tmp_path / "a") == 2
    assert "oracle needs truth" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_table_of_costs_travels_inside() -> None:
    source = read_source("dcut_h20", Asked(settings=["policies=[{kind: off}, {kind: smartspec}]", "reference=null"]))
    export = make(source, Wanted(("adaflash",), policy="smartspec"))[0][0]
    cost = parse_settings(export.documents["adasim_policy.json"], "mine").cost
    assert cost is not None
    assert cost.round_s(16, 256, 128, 384.0) == pytest.approx(source.cost.round_s(16, 256, 128, 384.0))


def test_extrapolation_and_limits_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = backend(cost=EAGLE | {"fitted_tokens": [1, 12]}, max_draft_len=7)
    assert run(written(tmp_path, backend=engine), "--to", "vllm", "--out", tmp_path / "a") == 0
    shown = capsys.readouterr().out
    assert "(measured 1..12)" in shown
    assert "contexts of 96 tokens" in shown
    about = json.loads((tmp_path / "a" / "vllm_speculative_config.about.json").read_text())
    assert about["measured"] == {"tokens": [1, 12]}
    assert "(measured 1..12)" in about["extrapolates"][-1]


def test_nothing_is_written_where_plain_decoding_is_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    useless = {"kind": "curves", "curves": {"default": {"kind": "geometric", "alpha": 0.01}}}
    engine = backend(cost=EAGLE, acceptance=useless, max_draft_len=7)
    assert run(written(tmp_path, backend=engine), "--to", "vllm", "--to", "sglang", "--out", tmp_path / "a") == 0
    assert capsys.readouterr().out.count("plain decoding is best at every batch") == 2
    assert not list((tmp_path / "a").iterdir())


def test_a_measured_table_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "best.csv"
    path.write_text("batch,k\n8,2\n1,5\n")
    assert read_best_k(path, 7, 64.0)[0] == [Range(1, 7, 5), Range(8, 8, 2)]
    path.write_text("batch,context,k,gain\n1,512,5,0.1\n1,4096,3,0.1\n9,512,4,0\n9,4096,1,0\n")
    found, how = read_best_k(path, 7, 3000.0)
    assert found == [Range(1, 8, 3), Range(9, 9, 1)]
    assert how == "the table best.csv, its rows of context 4096"
    path.write_text("batch,k\n2,5\n2,9\n")
    with pytest.raises(InputError) as caught:
        read_best_k(path, 7, 64.0)
    assert len(caught.value.problems) == 3


def test_a_profile_says_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("adaflash_qwen3_8b", "--to", "vllm", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exports"][0]["content"]["method"] == "dflash"
    assert any("512 tokens are taken" in note for note in document["from"]["notes"])


def test_bad_input_is_refused_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path)
    assert run(name, "--to", "vlm", "--policy", "nope", "--out", tmp_path / "a") == 2
    told = capsys.readouterr().err
    assert "--to vlm: unknown; allowed: vllm, sglang, sps, adaflash" in told
    assert "--policy nope: unknown; allowed: off" in told
    assert run(name, "--to", "sglang") == 2
    assert "fills blocks in one pass" in capsys.readouterr().err
    assert run(name, "--domain", "x", "--domain", "default=1", "--domain", "default=2") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert run("adaflash_table1", "--drafter", "eagle3") == 2
    assert "draft tree" in capsys.readouterr().err
    assert run("adaflash_qwen3_8b", "--profile", "dcut_h20", "--set", "a=1") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert run(name, "--to", "vllm", "--out", tmp_path / "b") == 0
    assert run(name, "--to", "vllm", "--out", tmp_path / "b") == 2
    assert "exists; use --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
