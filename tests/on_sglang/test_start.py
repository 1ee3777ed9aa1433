"""A server that cannot do what it is asked for does not start, and says why; stock SGLang gives the same tokens."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from adasim.errors import InputError
from adasim.real.sglang_plugin import contract
from tests.on_sglang.conftest import TOKENS
from tests.on_sglang.serving import ARGUMENTS, DRAFTER, Served, copy_of

DRAFTING = {
    "speculative_algorithm": "ADAFLASH",
    "speculative_draft_model_path": str(DRAFTER),
    "speculative_draft_attention_backend": "torch_native",
}
HEAD = '{"policy": {"kind": "head"}}'
WORKS = {"policy": HEAD, "arguments": ARGUMENTS | DRAFTING, "fits": contract.SUPPORTED}


def wrong(**arguments: Any) -> dict[str, Any]:
    return WORKS | {"arguments": ARGUMENTS | DRAFTING | arguments}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "works": (WORKS, "block 16"),
    "no policy": (WORKS | {"policy": ""}, "ADASIM_POLICY is not set, and"),
    "wrong policy": (WORKS | {"policy": '{"policy": {"kind": "hed"}}'}, "policy: kind 'hed'; allowed:"),
    "too long": (
        WORKS | {"policy": '{"policy": {"kind": "fixed", "verify_len": 17}}'},
        "fixed(verify_len=17): verify_len 17 with draft_len 16; allowed: verify_len 1..16",
    ),
    "no cost": (WORKS | {"policy": '{"policy": {"kind": "smartspec"}}'}, "smartspec needs cost; the engine provides"),
    "other block": (wrong(speculative_num_draft_tokens=8), "--speculative-num-draft-tokens 8; the checkpoint drafts"),
    "disaggregated": (wrong(disaggregation_mode="decode"), "--disaggregation-mode decode; allowed: null"),
    "other version": (WORKS | {"fits": ["0.4.0"]}, "ADAFLASH fits SGLang 0.4.0; SGLang 0.5.23 is installed"),
    "no drafter": (wrong(speculative_draft_model_path=None), "ADAFLASH: --speculative-draft-model-path is missing"),
    "window": (wrong(speculative_draft_window_size=64), "ADAFLASH: --speculative-draft-window-size is not supported"),
}


@pytest.fixture(scope="module")
def starts() -> dict[str, str]:
    cases = json.dumps({name: case for name, (case, _) in CASES.items()})
    return dict(run("starts.py", cases))


def run(script: str, *arguments: str) -> Any:
    """The JSON that a script beside this file prints last."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_a_start_works_or_ends_with_the_reason(name: str, starts: dict[str, str]) -> None:
    assert CASES[name][1] in starts[name]


def test_a_changed_signature_is_refused_and_named() -> None:
    where = "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._draft_write_ids"
    with pytest.raises(InputError) as caught:
        contract.check({where: "self plan cols", "sglang.srt.nowhere:f": ""})
    assert caught.value.problems[1:] == (
        f"{where} takes (self plan), expected (self plan cols)",
        "sglang.srt.nowhere:f is not there",
    )


def test_stock_sglang_decodes_the_same_tokens(plain: Served, prompts: list[list[int]]) -> None:
    assert run("stock.py", json.dumps(prompts), str(TOKENS), json.dumps(ARGUMENTS)) == plain.tokens


def test_stock_dflash_decodes_the_same_tokens(plain: Served, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = copy_of(DRAFTER, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["DFlashDraftModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file({k: w for k, w in weights.items() if not k.startswith("length_head")}, folder / "model.safetensors")
    arguments = ARGUMENTS | DRAFTING
    arguments |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(folder)}
    assert run("stock.py", json.dumps(prompts), str(TOKENS), json.dumps(arguments)) == plain.tokens
