"""What adasim exports, loaded by SGLang's own parsers."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams, resolve_candidate_steps_from_config
from sglang.srt.speculative.dspark_components.dspark_sps import SpsAdditiveCostTable, load_sps_table_from_path

from adasim.deploy.launch import launch
from adasim.exports import adaflash, sglang, sps
from adasim.exports.formats import lengths
from adasim.exports.source import Asked, Source, read_source
from adasim.real.sglang_plugin.settings import read_settings


def parsed(flags: Sequence[str]) -> argparse.Namespace:
    """Flags as the server's own command line takes them."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "TARGET", *shlex.split(" ".join(flags))])


@pytest.fixture(scope="module")
def eagle() -> Source:
    return read_source("autospec_glm47", Asked())


@pytest.fixture(scope="module")
def dflash() -> Source:
    return read_source("dcut_h20", Asked())


def test_adaptive_steps(eagle: Source, tmp_path: Path) -> None:
    chosen = lengths(eagle)
    export = sglang.export(eagle, chosen, "some/drafter")
    path = str(export.write(tmp_path)[0])
    arguments = parsed([f.replace("sglang_adaptive.json", path) for f in export.flags])
    assert arguments.speculative_adaptive
    assert arguments.speculative_adaptive_config == path
    assert arguments.speculative_num_steps in resolve_candidate_steps_from_config(path)
    assert arguments.speculative_num_draft_tokens == arguments.speculative_num_steps + 1
    params = AdaptiveSpeculativeParams(arguments.speculative_num_steps, path)
    for r in chosen.ranges:
        assert {params.get_steps_for_batch(n) for n in (r.first, r.last)} == {r.k}


def test_sps_table(dflash: Source, tmp_path: Path) -> None:
    """SGLang's seconds of a step are adasim's, but for what bias + alpha + theta cannot tell."""
    export = sps.export(dflash)
    path = str(export.write(tmp_path)[0])
    table = load_sps_table_from_path(path)
    assert isinstance(table, SpsAdditiveCostTable)
    worst = float(export.about["fit"]["worst_error"])
    assert 0 < worst < 0.2
    off = []
    for row in sps.points(dflash):
        assert row.batch is not None
        assert row.tokens is not None
        seconds = table.step_time(num_reqs=row.batch, budget=row.tokens - row.batch)
        off.append(abs(1e3 * seconds / row.ms - 1))
    assert max(off) == pytest.approx(worst)
    (flag,) = export.flags
    assert parsed([flag]).speculative_dspark_sps_table_path == "sps_table.json"


def test_adaflash_policy(dflash: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings as the plugin reads them, and flags as the server does."""
    monkeypatch.delenv("ADASIM_POLICY", raising=False)
    chosen = lengths(dflash, draft_block=True)
    policy = adaflash.scheduled(dflash, chosen)
    export = adaflash.export(dflash, policy, chosen)
    export.write(tmp_path)
    assert read_settings(str(tmp_path)).policy == policy.model_copy(update={"name": None})
    assert parsed(export.flags).max_running_requests == dflash.max_batch


def test_launch_flags(dflash: Source) -> None:
    """Every flag of a deployment is one that the server knows, with its value."""
    flags = launch(dflash, "TARGET", "DRAFTER", None).flags | {"--mem-fraction-static": "0.85", "--tp-size": "2"}
    flags |= {"--chunked-prefill-size": "4096", "--max-prefill-tokens": "8192", "--max-total-tokens": "100000"}
    arguments = parsed([f"{k} {v}" for k, v in flags.items()])
    assert arguments.speculative_algorithm == "ADAFLASH"
    assert arguments.speculative_num_draft_tokens == 16
    assert arguments.disable_radix_cache
    assert arguments.attention_backend == "fa3"
    assert (arguments.tp_size, arguments.max_total_tokens) == (2, 100000)
