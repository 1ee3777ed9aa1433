"""Another drafter for a running engine: the target untouched, running requests undisturbed, bad ones refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from adasim.errors import InputError
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.real.sglang_plugin.reload import reload_drafter
from tests.on_sglang.conftest import TOKENS
from tests.on_sglang.serving import DRAFTER, Served, Server, copy_of

Change = Callable[[dict[str, Tensor]], None]


def spoiled(folder: Path, change: Change) -> Path:
    """A copy of the shipped drafter with other weights."""
    copy_of(DRAFTER, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def checksums(server: Server) -> dict[str, str]:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    manager = server.engine.tokenizer_manager
    _, _, ranks, _ = server.engine.loop.run_until_complete(manager.check_weights(CheckWeightsReqInput()))
    return dict(ranks[0]["checksums"])


def load(server: Server, folder: Path, version: str) -> None:
    server.engine.loop.run_until_complete(reload_drafter(server.engine.tokenizer_manager, folder, version))


@pytest.fixture(autouse=True)
def _shipped_again(server: Server) -> Iterator[None]:
    yield
    load(server, DRAFTER, "shipped")


def zero_matrices(weights: dict[str, Tensor]) -> None:
    for name, w in weights.items():
        if w.ndim == 2 and not name.startswith("length_head"):
            w.zero_()


def test_only_draft_tensors_change_and_output_does_not(
    server: Server, plain: Served, prompts: list[list[int]], tmp_path: Path
) -> None:
    good = server.serve(Fixed(verify_len=16), prompts, TOKENS)
    before = checksums(server)
    load(server, spoiled(tmp_path / "empty", zero_matrices), "empty")
    changed = {name for name, value in checksums(server).items() if value != before[name]}
    assert changed
    assert all(name.startswith("draft") for name in changed)
    bad = server.serve(Fixed(verify_len=16), prompts, TOKENS)
    assert good.tokens == bad.tokens == plain.tokens
    accepted = [sum(m["spec_num_correct_drafts"] for m in run.meta) for run in (good, bad)]
    assert accepted[0] > 5 * accepted[1]
    load(server, DRAFTER, "shipped")
    assert checksums(server) == before


def test_a_reloaded_head_decides(server: Server, prompts: list[list[int]], tmp_path: Path) -> None:
    def shy(weights: dict[str, Tensor]) -> None:
        weights["length_head.out.weight"].zero_()
        weights["length_head.out.bias"].fill_(-20.0)

    load(server, spoiled(tmp_path / "shy", shy), "shy")
    run = server.serve(Head(), prompts, 6)
    assert {v for r in run.rounds for v in r.verify_lens} == {1}


def test_running_requests_go_on_across_a_reload(server: Server, prompts: list[list[int]], tmp_path: Path) -> None:
    tokens, empty = 128, spoiled(tmp_path / "empty", zero_matrices)
    plain = server.serve(Off(), prompts[:1], tokens)
    server.use(Fixed(verify_len=4))

    async def both() -> dict[str, Any]:
        shape = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        stream = await server.engine.async_generate(input_ids=prompts[0], sampling_params=shape, stream=True)
        await anext(stream)
        second = await anext(stream)
        assert len(second["output_ids"]) < tokens
        await reload_drafter(server.engine.tokenizer_manager, empty, "empty")
        return [chunk async for chunk in stream][-1]

    last = server.engine.loop.run_until_complete(both())
    assert last["output_ids"] == plain.tokens[0]
    assert len(last["meta_info"]["weight_versions"]) > 1


def test_an_update_that_the_server_does_not_begin_is_told_and_serving_goes_on(
    server: Server, plain: Served, prompts: list[list[int]]
) -> None:
    server.engine.begin_weight_update(selector="draft")
    try:
        with pytest.raises(InputError, match=r"the server began no update: .*already open"):
            load(server, DRAFTER, "second")
    finally:
        server.engine.end_weight_update()
    assert server.serve(Fixed(verify_len=4), prompts, 4).tokens == [t[:4] for t in plain.tokens]


def nan(weights: dict[str, Tensor]) -> None:
    weights["fc.weight"][0, 0] = float("nan")


def nan_head(weights: dict[str, Tensor]) -> None:
    weights["length_head.out.bias"].fill_(float("inf"))


def short(weights: dict[str, Tensor]) -> None:
    weights["norm.weight"] = weights["norm.weight"][:-1].contiguous()


def missing(weights: dict[str, Tensor]) -> None:
    del weights["layers.1.mlp.up_proj.weight"]


def other_head(weights: dict[str, Tensor]) -> None:
    weights["length_head.narrow.bias"] = weights["length_head.narrow.bias"][:-1].contiguous()


BAD: dict[Change, str] = {
    nan: "'fc.weight' holds values that are not finite",
    nan_head: "length_head.out.bias.* not finite",
    short: r"'norm.weight' has shape \[575\], expected \[576\]",
    missing: "'layers.1.mlp.up_proj.weight' is missing",
    other_head: r"'length_head.narrow.bias' has shape",
}


@pytest.mark.parametrize("change", BAD, ids=lambda c: c.__name__)
def test_a_bad_checkpoint_is_not_even_sent(
    change: Change, server: Server, plain: Served, prompts: list[list[int]], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=BAD[change]):
        load(server, spoiled(tmp_path / "bad", change), "bad")
    assert server.serve(Fixed(verify_len=4), prompts, 4).tokens == [t[:4] for t in plain.tokens]


def test_a_cut_off_file_is_refused(server: Server, tmp_path: Path) -> None:
    folder = copy_of(DRAFTER, tmp_path / "cut")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        load(server, folder, "cut")


def test_another_shape_is_refused(server: Server, tmp_path: Path) -> None:
    folder = copy_of(DRAFTER, tmp_path / "shape")
    config = json.loads((folder / "config.json").read_text()) | {"block_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="its shape is"):
        load(server, folder, "shape")


@pytest.mark.parametrize("change", BAD, ids=lambda c: c.__name__)
def test_the_server_itself_refuses_bad_tensors_and_goes_on(
    change: Change, server: Server, plain: Served, prompts: list[list[int]]
) -> None:
    """Sent past the client's checks: nothing is written, and nothing dies."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    weights = {k: w.clone() for k, w in load_file(DRAFTER / "model.safetensors").items()}
    change(weights)
    before, engine = checksums(server), server.engine
    engine.begin_weight_update(selector="draft")
    update = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(list(weights.items()))],
        flush_cache=False, selector="draft", weight_version="bad",
    )  # fmt: skip
    done, message = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(update))
    engine.end_weight_update()
    assert not done
    assert message
    assert checksums(server) == before
    assert server.serve(Fixed(verify_len=4), prompts, 4).tokens == [t[:4] for t in plain.tokens]
