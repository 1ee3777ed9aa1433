"""A server that cannot do what it is asked for does not start, and says why; stock SGLang gives the same tokens."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from adasim.errors import InputError
from adasim.real.sglang_plugin import contract, cpu, plugin
from tests.on_sglang.conftest import TOKENS
from tests.on_sglang.serving import ARGUMENTS, DRAFTER, Served, copy_of, run

DRAFTING = {
    "speculative_algorithm": "ADAFLASH",
    "speculative_draft_model_path": str(DRAFTER),
    "speculative_draft_attention_backend": "torch_native",
}
HEAD = '{"policy": {"kind": "head"}}'
WORKS = {"policy": HEAD, "arguments": ARGUMENTS | DRAFTING, "fits": contract.SUPPORTED, "simulate": ""}


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
    "simulated": (WORKS | {"simulate": "3"}, "SGLANG_SIMULATE_ACC_LEN='3' is not supported: unset it"),
    "window": (wrong(speculative_draft_window_size=64), "ADAFLASH: --speculative-draft-window-size is not supported"),
}


@pytest.fixture(scope="module")
def starts() -> dict[str, str]:
    cases = json.dumps({name: case for name, (case, _) in CASES.items()})
    return dict(run("starts.py", cases))


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


def test_an_sglang_too_different_to_register_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.SWITCH)  # its hooks are registered already
    monkeypatch.delitem(sys.modules, "adasim.real.sglang_plugin.algorithm", raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.spec_registry", None)
    with pytest.raises(InputError, match=r"ADAFLASH fits SGLang 0.5.23; SGLang \S+ is installed") as caught:
        plugin.register()
    assert "sglang.srt.speculative.spec_registry:CustomSpecAlgo.__init__ is not there" in caught.value.problems


def test_what_cannot_verify_ragged_blocks_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from adasim.real.sglang_plugin.algorithm import _unsupported_on_gpu

    def said(mode: str = "compact", **given: str) -> list[str]:
        monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", mode)
        names = ("prefill_attention_backend", "decode_attention_backend", "speculative_draft_attention_backend")
        args = dict.fromkeys(names) | {"attention_backend": "fa3", "speculative_attention_mode": "prefill"} | given
        return [text for wrong, text in _unsupported_on_gpu(SimpleNamespace(**args)) if wrong]

    assert said() == []
    assert said(attention_backend="trtllm_mla") == []
    assert said(decode_attention_backend="triton") == []  # verifies nothing
    assert "SGLANG_RAGGED_VERIFY_MODE=static; allowed on a GPU: compact" in said("static")[0]
    (target,) = said(attention_backend="triton", speculative_draft_attention_backend="fa3")
    assert "--attention-backend: triton" in target
    assert "allowed: fa3, fa4, flashinfer, trtllm_mha, trtllm_mla" in target
    (draft,) = said(speculative_draft_attention_backend="triton")
    assert "--speculative-draft-attention-backend triton" in draft
    assert len(said(decode_attention_backend="triton", speculative_attention_mode="decode")) == 1


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
