"""Rows to fit, from the files that people have: which runs, at what batch, with what left out and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from adasim.calibration.profile import Profile
from adasim.calibration.throughput_files import read_throughput
from adasim.calibration.throughput_table import Row, batch_of, context_of, row_of
from adasim.cli import main
from adasim.errors import InputError
from adasim.importers.fields import Malformed
from adasim.importers.tables import RunRow
from tests import import_samples as samples


def run(**told: Any) -> RunRow:
    return RunRow("x", 0, **told)


def written(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def vllm(tmp_path: Path, batch: int, tok_s: float, *, k: int = 0, accepted: int = 0, **more: Any) -> Path:
    """A benchmark of 8 requests per client, 100 rounds; plain ones have no counters."""
    record = {n: v for n, v in samples.VLLM_BENCH.items() if not n.startswith("spec_decode")}
    record |= {"max_concurrency": batch, "output_throughput": tok_s, "completed": 8 * batch, "label": ""}
    if k:
        record |= {
            "spec_decode_num_drafts": 100,
            "spec_decode_draft_tokens": 100 * k,
            "spec_decode_accepted_tokens": accepted,
        }
    path = tmp_path / f"b{batch}k{k}.json"
    path.write_text(json.dumps(record | more))
    return path


def test_benchmarks_at_several_loads_become_rows(tmp_path: Path) -> None:
    """Plain runs have no counters; 100 rounds of 3 drafts with 140 accepted give 2.4 tokens each."""
    paths = [vllm(tmp_path, b, t) for b, t in ((1, 51.0), (8, 380.0), (64, 2100.0))]
    found = read_throughput([*paths, vllm(tmp_path, 8, 700.0, k=3, accepted=140)])
    told = [r._replace(context=None) for r in found.rows]
    assert told == [Row(1, 0, 51), Row(8, 0, 380), Row(64, 0, 2100), Row(8, 3, 700, tau=2.4)]
    assert found.model == samples.VLLM_BENCH["model_id"]
    assert found.engine == "vllm"
    assert any("no speculation counters" in n for n in found.notes)


def test_a_name_chooses_speculative_runs_and_their_plain_ones(tmp_path: Path) -> None:
    """Plain runs of vLLM have another label and no counters."""
    plain = vllm(tmp_path, 8, 380.0)
    both = [vllm(tmp_path, b, 700.0, k=3, accepted=140, label=name) for b, name in ((8, "eagle1"), (16, "eagle3"))]
    rows = read_throughput([plain, *both], only="eagle3").rows
    assert [(r.batch, r.k) for r in rows] == [(8, 0), (16, 3)]


def test_from_import_to_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The imported folder gives the rows of its files, their notes with them, and so the same fit."""
    paths = [vllm(tmp_path, b, t) for b, t in ((1, 51.0), (8, 380.0), (64, 2100.0))]
    paths.append(vllm(tmp_path, 8, 700.0, k=3, accepted=140))
    ok("import", *paths, "--out", tmp_path / "mine")
    direct, folder = read_throughput(paths), read_throughput([tmp_path / "mine"])
    assert folder.rows == direct.rows
    assert folder.engine == direct.engine
    assert any("no speculation counters" in n for n in folder.notes)
    for name, given in (("direct", paths), ("folder", [tmp_path / "mine"])):
        ok("calibrate", "--from-throughput", *given, "--out", tmp_path / f"{name}.yaml", "--set", "source=lab")
    one, two = (Profile.load(str(tmp_path / f"{n}.yaml")) for n in ("direct", "folder"))
    assert one.cost == two.cost
    assert one.acceptance == two.acceptance
    assert (one.provenance.source, one.provenance.model) == ("lab", samples.VLLM_BENCH["model_id"])
    assert "4 rows of tokens per second, 3 of them plain decoding" in capsys.readouterr().out


def ok(*arguments: object) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    assert caught.value.code == 0


def test_logs_tell_throughput_at_their_mean_batch(tmp_path: Path) -> None:
    """SGLang: 1 request of 2.5 tokens a round, then 3 of 1.9: 8.2 tokens in 2.5/g1 + 5.7/g2 of a round's time."""
    lines = ((1, 2.5, 100.0), (3, 1.9, 285.0))
    text = "server_args=ServerArgs(speculative_algorithm='EAGLE', speculative_num_draft_tokens=4)\n"
    text += "".join(
        f"Decode batch. #running-req: {n}, accept len: {tau}, gen throughput (token/s): {g}, #queue-req: 0\n"
        for n, tau, g in lines
    )
    (row,) = read_throughput([written(tmp_path, text, "log")]).rows
    assert (row.batch, row.k) == (2, 3)
    assert row.tau == pytest.approx(8.2 / 4)
    assert row.tok_s == pytest.approx(8.2 / (2.5 / 100 + 5.7 / 285))


def test_trees_of_a_log_are_trees(tmp_path: Path) -> None:
    text = "server_args=ServerArgs(speculative_algorithm='EAGLE', speculative_num_steps=3, speculative_eagle_topk=4, "
    text += "speculative_num_draft_tokens=8)\n"
    text += "Decode batch. #running-req: 2, accept len: 2.00, gen throughput (token/s): 90.0, #queue-req: 0\n"
    assert read_throughput([written(tmp_path, text, "log")]).rows == [Row(2, 7, 90.0, 2.0, steps=3, top_k=4)]


def test_the_batch_is_what_was_in_flight() -> None:
    assert batch_of(run(concurrency=16.0)) == 16
    assert batch_of(run(concurrency=16.0, concurrency_mean=14.9)) == 16
    assert batch_of(run(concurrency=256.0, concurrency_mean=40.2)) == 40  # a request rate kept it below
    assert batch_of(run(e2e_mean_ms=2000.0, requests=100, duration_s=25.0)) == 8  # Little: 4 a second, 2 s each
    assert batch_of(run()) is None


def test_the_context_is_the_prompt_and_half_of_the_output() -> None:
    assert context_of(run(requests=10, prompt_tokens=5000, output_tokens=2000)) == 600
    assert context_of(run(context=300.0, requests=10, prompt_tokens=5000, output_tokens=2000)) == 300
    assert context_of(run(requests=10)) is None


@pytest.mark.parametrize(
    ("told", "row"),
    [
        ({"k": 3, "concurrency": 4.0, "tpot_mean_ms": 20.0}, Row(4, 3, 200.0)),  # 4 requests x 50 tokens a second
        ({"k": 3, "output_tok_s": 9.0, "tau": 2.0}, Row(1, 3, tau=2.0)),  # at no known load
        ({"k": 0, "concurrency": 4.0, "output_tok_s": 9.0, "tau": 1.0}, Row(4, 0, 9.0)),
        (
            {"k": 15, "topk": 4, "depth": 5, "concurrency": 4.0, "output_tok_s": 9.0, "tau": 2.0},
            Row(4, 15, 9.0, 2.0, steps=5, top_k=4),
        ),
    ],
)
def test_a_run_as_a_row(told: dict[str, Any], row: Row) -> None:
    assert row_of(run(**told)) == row


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"concurrency": 4.0, "output_tok_s": 9.0}, "draft length is not told"),
        ({"engine": "vllm", "tau": 2.0}, "draft length is not told"),
        ({"k": 4, "rounds": 100, "drafted": 250, "tau": 2.0}, "length varied"),
        ({"k": 0, "output_tok_s": 9.0}, "neither tokens per second at a concurrency"),
        ({"k": 15, "topk": 4, "concurrency": 4.0, "output_tok_s": 9.0, "tau": 2.0}, "a tree needs its steps"),
        ({"k": 15, "topk": 4, "depth": 5, "concurrency": 4.0, "output_tok_s": 9.0}, "a tree needs its steps"),
    ],
)
def test_what_cannot_be_a_row(told: dict[str, Any], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        row_of(run(**told))


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    text = "policy,concurrency,k,tok_s\noff,4,0,100\nfixed,4,3,150\nadaptive,4,,160\nauto,8,,170\n"
    found = read_throughput([written(tmp_path, text)])
    assert found.rows == [Row(4, 0, 100), Row(4, 3, 150)]
    assert found.notes[0].startswith("2 of 4 runs are left out: their draft length is not told, or varied")
    with pytest.raises(InputError, match=r"nothing to fit[^.]*2 of 2 runs"):
        read_throughput([written(tmp_path, "policy,concurrency,tok_s\nadaptive,4,160\nauto,8,170\n")])


def test_the_bonus_token_is_told_by_plain_decoding_or_a_name(tmp_path: Path) -> None:
    zero = read_throughput([written(tmp_path, "concurrency,k,tok_s,accept_length\n4,0,9,0\n4,3,12,1.4\n")])
    assert zero.rows[1] == Row(4, 3, 12.0, tau=2.4)
    assert any("leave out the bonus token" in n for n in zero.notes)
    one = read_throughput([written(tmp_path, "concurrency,k,tok_s,accept_length\n4,0,9,1\n4,3,12,1.4\n")])
    assert (one.rows[1].tau, one.notes) == (1.4, [])
    silent = read_throughput([written(tmp_path, "concurrency,k,tok_s,accept_length\n4,3,12,1.4\n")])
    assert silent.rows[0].tau == 1.4
    assert any("taken to count the bonus token" in n for n in silent.notes)
    named = read_throughput([written(tmp_path, "concurrency,k,tok_s,accepted_per_round\n4,3,12,1.4\n")])
    assert named.rows[0].tau == 2.4
    with pytest.raises(InputError, match=":2: accept length of plain decoding is 0, allowed: 1, or 0 in all rows"):
        read_throughput([written(tmp_path, "batch,k,tok_s,accept_length\n1,0,5,0\n2,0,5,1\n1,3,5,2\n")])


def test_contexts_that_are_alike_are_one(tmp_path: Path) -> None:
    text = "batch,k,tok_s,context\n1,0,50,{}\n1,3,90,{}\n"
    alike = read_throughput([written(tmp_path, text.format(1000, 1100))])
    assert [r.context for r in alike.rows] == [1050, 1050]
    assert alike.notes == ["contexts of 1000 to 1100 tokens are taken for one"]
    some = read_throughput([written(tmp_path, text.format(1000, ""))])
    assert [r.context for r in some.rows] == [1000, 1000]
    assert some.notes == ["some runs do not tell their context: it is taken for the others', 1000 tokens"]
    far = read_throughput([written(tmp_path, text.format(1000, 8000))])
    assert [r.context for r in far.rows] == [1000, 8000]


def test_one_model_and_one_drafter_at_a_time(tmp_path: Path) -> None:
    text = "model,draft,batch,k,tok_s\na,none,1,0,50\na,eagle1,1,3,80\na,eagle3,1,3,90\nb,none,1,0,20\nb,eagle1,1,3,30\n"
    path = written(tmp_path, text)
    with pytest.raises(InputError, match="rows of several models: a, b; choose"):
        read_throughput([path])
    found = read_throughput([path], only="eagle3")
    assert found.rows == [Row(1, 0, 50), Row(1, 3, 90)]
    alone = "\n".join(line for line in text.splitlines() if not line.startswith("b"))
    mixed = read_throughput([written(tmp_path, alone)])
    assert any("different labels are fitted together: a · eagle1; a · eagle3" in n for n in mixed.notes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch,k\n1,0\n", "begins like none of the known formats"),
        ("batch,k,tok_s\n0,0,5\n2,1,-3\n", ":2: batch is '0', allowed: a number >= 1"),
        ("batch,k,tok_s\n0,0,5\n2,1,-3\n", ":3: tok_s is '-3', allowed: a number >= 0"),
        ("batch,k,tok_s,accept_length\n1,3,5,4.2\n", r"accept length 4.2 .* allowed: 1\.\.4 for 3 drafts"),
        ("batch,k,tok_s\n1,3,\n", "no measure in this row"),
    ],
)
def test_bad_tables_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        read_throughput([written(tmp_path, text)])


def test_the_concurrency_of_runs_that_do_not_tell_it(tmp_path: Path) -> None:
    """vllm#20780's shape: milliseconds a token of one request."""
    path = written(tmp_path, "K,AL_eagle3,TPOT_ms_vanilla,TPOT_ms_eagle3\n2,2.36,8.0,4.0\n3,2.79,8.0,5.0\n")
    assert [r.tok_s for r in read_throughput([path]).rows] == [None, None]
    rows = read_throughput([path], concurrency=1).rows
    assert [(r.batch, r.k, r.tok_s, r.tau) for r in rows] == [(1, 2, 250, 2.36), (1, 0, 125, None), (1, 3, 200, 2.79)]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder of adasim import"):
        read_throughput([tmp_path])
