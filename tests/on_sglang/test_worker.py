"""Parts of the worker that need SGLang's classes and no engine."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adasim.errors import InputError
from adasim.types import IntArray
from tests.on_sglang.serving import DRAFTER


class Group:
    """A tensor-parallel group of two, as one of its ranks sees it."""

    world_size = 2

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self.rank_in_group, self.sent = rank, sent

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0
        if self.rank_in_group == 0:
            self.sent.append(value)
        return self.sent[-1]


def test_rank_zero_decides_and_the_others_follow() -> None:
    from adasim.real.sglang_plugin.worker import AdaFlashWorker

    sent: list[Any] = []
    ranks: list[Any] = [SimpleNamespace(_group=Group(rank, sent)) for rank in (0, 1)]
    first = AdaFlashWorker._first_rank(ranks[0], lambda: np.array([3, 1, 16]))
    asked: list[int] = []

    def decide() -> IntArray:
        asked.append(1)
        return np.array([9, 9, 9])

    second = AdaFlashWorker._first_rank(ranks[1], decide)
    assert first.tolist() == second.tolist() == [3, 1, 16]
    assert second.dtype == np.int64
    assert not asked


@pytest.mark.parametrize("fused", [True, False])
def test_copies_of_weights_are_made_anew_after_a_reload(fused: bool) -> None:
    from adasim.real.sglang_plugin.worker import AdaFlashWorker

    made: list[str] = []
    worker: Any = SimpleNamespace(
        _use_fused_kv_materialize=fused,
        _init_fused_kv_helper=lambda: made.append("kv"),
        _make_draft_head=lambda: made.append("head"),
    )
    AdaFlashWorker.refresh_after_reload(worker)
    assert made == ["head", "kv"][: 1 + fused]


@pytest.mark.parametrize("sizes", [None, [8, 16, 64]], ids=["eager", "graphs by tokens"])
def test_blocks_are_packed_one_behind_the_other(sizes: list[int] | None) -> None:
    """Three blocks of four cut to 2, 4 and 1; a graph's size is filled up with tokens that nobody reads."""
    import torch

    from adasim.real.sglang_plugin.packing import Window, pack

    table = torch.arange(100, 160).view(3, 20)
    prefix = torch.tensor([5, 0, 9])
    runner = SimpleNamespace(device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=table))
    batch = SimpleNamespace(seq_lens=prefix, req_pool_indices=torch.tensor([0, 1, 2]))
    positions = prefix[:, None] + torch.arange(4)
    window = Window(batch, runner, positions, table.gather(1, positions), prefix, None)
    blocks = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    packed = pack(window, blocks, np.array([2, 4, 1]), sizes)
    assert packed.tokens[:7].tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert packed.positions[:7].tolist() == [5, 6, 0, 1, 2, 3, 9]
    assert packed.slots[:7].tolist() == [105, 106, 120, 121, 122, 123, 149]
    assert packed.columns is not None
    assert packed.columns[:7].tolist() == [0, 1, 4, 5, 6, 7, 8]
    assert len(packed.tokens) == (8 if sizes else 7)
    assert packed.columns[7:].tolist() == [-1] * (1 if sizes else 0)


def test_anchors_and_drafts_have_one_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernel reads both at the width of the drafts."""
    import torch
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildRaggedVerifyWindow

    from adasim.real.sglang_plugin import packing

    given: dict[str, Any] = {}

    def execute(**arguments: Any) -> Any:
        given.update(arguments)
        return SimpleNamespace(verify_ids=None, positions=None, verify_cache_loc=None, window_index=None)

    monkeypatch.setattr(BuildRaggedVerifyWindow, "execute", execute)
    blocks = torch.arange(12).view(3, 4)
    window = packing.Window(SimpleNamespace(), SimpleNamespace(device="cpu"), blocks, blocks, torch.zeros(3), None)
    packing.pack(window, blocks, np.array([2, 4, 1]))
    anchors, drafts = given["draft_block_ids"].reshape(-1), given["draft_tokens"].reshape(-1)
    width = given["draft_tokens"].shape[1]
    assert anchors[::width].tolist() == blocks[:, 0].tolist()
    assert drafts.view(3, width).tolist() == blocks[:, 1:].tolist()


def test_draws_are_shaped_as_their_request_asks_and_stop_at_the_cut() -> None:
    import torch

    from adasim.real.sglang_plugin.drawing import draw

    logits = torch.randn(3 * 4, 50, generator=torch.Generator().manual_seed(0))
    info = SimpleNamespace(
        is_all_greedy=False, temperatures=torch.tensor([[1.0], [1e-4], [2.0]]), top_ks=torch.tensor([1, 50, 2]),
        top_ps=torch.ones(3), min_ps=torch.zeros(3), need_min_p_sampling=False, sampling_seed=None,
    )  # fmt: skip
    lengths = np.array([4, 2, 1])
    tokens, best = draw(logits, info, torch.arange(12).view(3, 4), lengths), logits.topk(2).indices.view(3, 4, 2)
    assert tokens[0].tolist() == best[0, :, 0].tolist()
    assert tokens[1].tolist() == [*best[1, :2, 0].tolist(), 0, 0]
    assert tokens[2, 0] in best[2, 0]
    assert tokens[2, 1:].tolist() == [0, 0, 0]


def test_whole_blocks_need_no_layout_unless_graphs_go_by_tokens() -> None:
    import torch

    from adasim.real.sglang_plugin.packing import Window, pack

    positions = torch.arange(8).view(2, 4)
    window = Window(SimpleNamespace(), None, positions, positions + 50, torch.zeros(2), None)
    packed = pack(window, positions + 10, np.array([4, 4]))
    assert packed.layout is None
    assert packed.tokens.tolist() == list(range(10, 18))
    assert packed.slots.tolist() == list(range(50, 58))


@pytest.mark.parametrize("change", ["missing", "extra", "narrower"])
def test_a_first_head_of_no_known_form_is_refused_before_anything_is_written(change: str) -> None:
    import torch
    from safetensors.torch import load_file

    from adasim.real.sglang_plugin.draft_model import AdaFlashDraftModel

    config = json.loads((DRAFTER / "config.json").read_text())
    weights = load_file(DRAFTER / "model.safetensors")
    if change == "missing":
        del weights["length_head.narrow.weight"]
    if change == "extra":
        weights["length_head.other.weight"] = torch.zeros(3)
    if change == "narrower":
        weights["length_head.narrow.weight"] = weights["length_head.narrow.weight"][:, :-2]
    model: Any = SimpleNamespace(
        length_head=None, config=SimpleNamespace(to_dict=lambda: config, hidden_size=config["hidden_size"])
    )
    with pytest.raises(InputError, match="no length head of this drafter has these tensors"):
        AdaFlashDraftModel.load_weights(model, weights.items())
