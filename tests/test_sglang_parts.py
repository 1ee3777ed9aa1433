"""The parts of the SGLang plugin that need no SGLang: settings, deciding, acceptance, the sharded head."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from adasim.errors import InputError
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.real.sglang_plugin.decider import Decider
from adasim.real.sglang_plugin.rounds import Round, RoundLog
from adasim.real.sglang_plugin.settings import FILE, VARIABLE, parse_policy, parse_settings, read_settings
from adasim.types import BatchView, DraftView, EngineCaps, IntArray, StepOutcome

torch = pytest.importorskip("torch")

from adasim.real.checkpoint import read_config, read_shape  # noqa: E402
from adasim.real.sglang_plugin.accept import Accepted, accept, committed  # noqa: E402
from adasim.real.sglang_plugin.draft_head import DraftHead  # noqa: E402
from adasim.real.sglang_plugin.drawing import draw  # noqa: E402
from adasim.real.sglang_plugin.reload import fitting  # noqa: E402

CAPS = EngineCaps(7, 4, provides=frozenset({"accept_len"}))
HEAD = {"policy": {"kind": "head", "gamma": {"1": 1.0, "32": 0.8}}}


class Listening(Policy):
    """Verifies three tokens and remembers what it is told."""

    kind: str = "listening"

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        return np.full(len(batch), 3)

    def observe(self, outcome: StepOutcome) -> None:
        HEARD.append(outcome)


HEARD: list[StepOutcome] = []


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_settings_lie_beside_the_checkpoint_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / FILE).write_text(json.dumps(HEAD))
    assert read_settings(str(tmp_path)).policy == Head(gamma={1: 1.0, 32: 0.8})
    monkeypatch.setenv(VARIABLE, '{"policy": {"kind": "fixed", "verify_len": 4}}')
    assert read_settings(str(tmp_path)).policy == Fixed(verify_len=4)
    other = tmp_path / "other.json"
    other.write_text('{"policy": {"kind": "off"}, "kept_rounds": 5}')
    monkeypatch.setenv(VARIABLE, str(other))
    assert read_settings(str(tmp_path)).kept_rounds == 5


def test_no_settings_are_an_error_that_says_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(InputError, match=rf"ADASIM_POLICY is not set, and .*{FILE} is not there"):
        read_settings(str(tmp_path))
    monkeypatch.setenv(VARIABLE, "nowhere.json")
    with pytest.raises(InputError, match=r"ADASIM_POLICY: nowhere.json is not there"):
        read_settings(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"policy": {"kind": "hed"}}', r"x: policy: kind 'hed'; allowed: .*head"),
        ('{"policy": {"kind": "head", "gama": 1.3}}', r"x: policy.gama: unknown key; did you mean gamma"),
        ("{}", "x: policy: is missing"),
        ("{", "x: .*JSON"),
        ('{"policy": {"kind": "off"}, "scheduler": {"kind": "ema"}}', r"ema cannot run inside SGLang.*allowed: fcfs"),
    ],
)
def test_wrong_settings_are_explained(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_settings(text, "x")


def test_a_round_passes_three_times_and_is_kept() -> None:
    HEARD.clear()
    now = iter([1.0, 1.5, 3.0])
    log = RoundLog(8)
    decider = Decider(Listening(), CAPS, log, clock=lambda: next(now))
    decider.queued = 5
    assert decider.draft_lens(["a", "b"], [10, 20]).tolist() == [7, 7]
    assert decider.verify_lens(DraftView(np.array([7, 7]))).tolist() == [3, 3]
    decider.accepted([2, 0])
    assert [(o.accepted.tolist(), o.seconds, o.queue_depth) for o in HEARD] == [([2, 0], 2.0, 5)]
    assert log.dump()["requests"] == {"0": "a", "1": "b"}
    row = Round(*log.dump()["rounds"][0])
    assert row == Round(0, 1.0, 3.0, 0.5, 1.5, 5, [0, 1], [10, 20], [7, 7], [3, 3], [2, 0], None, 0, 0, [False] * 2)


def test_late_feedback_goes_to_the_policy_that_decided() -> None:
    """Overlapped scheduling: a round begins before the last one's acceptance is known, and policies may be switched."""
    HEARD.clear()
    decider = Decider(Listening(), CAPS, RoundLog(8))
    view = DraftView(np.array([7]), accept_len=np.array([5.2]))
    for name in ("a", "b"):
        decider.draft_lens([name], [9])
        decider.verify_lens(view)
    decider.use(Head())
    decider.draft_lens(["b"], [9])
    assert decider.verify_lens(view).tolist() == [5]
    for run in ([1], [2], [3]):
        decider.accepted(run)
    assert [o.accepted.tolist() for o in HEARD] == [[1], [2]]
    assert [Round(*r).accept_lens for r in decider.log.dump()["rounds"]] == [[5.2]] * 3


def test_a_refused_policy_leaves_the_old_one() -> None:
    decider = Decider(Fixed(verify_len=4), EngineCaps(7, 4), RoundLog(0))
    with pytest.raises(InputError, match="needs accept_len"):
        decider.use(Head())
    decider.draft_lens(["a"], [1])
    assert decider.verify_lens(DraftView(np.array([3]))).tolist() == [4]


def test_a_report_of_another_round_is_noticed() -> None:
    decider = Decider(Fixed(verify_len=4), CAPS, RoundLog(8))
    decider.draft_lens(["a", "b"], [1, 1])
    decider.verify_lens(DraftView(np.array([3, 3])))
    with pytest.raises(RuntimeError, match="round 0 had 2 requests; the engine reports 1"):
        decider.accepted([0])


def test_a_finished_name_may_come_again_as_another_request() -> None:
    decider = Decider(Fixed(verify_len=4), CAPS, RoundLog(8))
    for _ in range(2):
        decider.draft_lens(["a"], [1])
        decider.verify_lens(DraftView(np.array([3])))
        decider.accepted([0])
        decider.forget("a")
    assert [r[6] for r in decider.log.dump()["rounds"]] == [[0], [1]]


def test_the_ring_keeps_the_last_rounds_and_their_names_only() -> None:
    log = RoundLog(3)
    for i in range(20):
        log.append(Round(i, 0, 0, 0, 0, 0, [i], [1], [1], [1], [0], None, 0, 0, [False]), [f"r{i}"])
    kept = log.dump()
    assert [r[0] for r in kept["rounds"]] == [17, 18, 19]
    assert kept["requests"] == {"17": "r17", "18": "r18", "19": "r19"}
    none = RoundLog(0)
    none.append(Round(0, 0, 0, 0, 0, 0, [0], [1], [1], [1], [0], None, 0, 0, [False]), ["a"])
    assert none.dump()["rounds"] == []


def test_a_running_server_takes_another_policy_and_nothing_else() -> None:
    assert parse_policy('{"policy": {"kind": "fixed", "verify_len": 4}}', "x") == Fixed(verify_len=4)
    with pytest.raises(InputError) as caught:
        parse_policy('{"policy": {"kind": "off"}, "kept_rounds": 5, "scheduler": {"kind": "fcfs"}}', "x")
    assert caught.value.problems == (
        "x: kept_rounds stays as it was at the start; allowed: policy",
        "x: scheduler stays as it was at the start; allowed: policy",
    )


def test_greedy_tokens_are_read_up_to_the_cut() -> None:
    logits = torch.randn(2 * 3, 9)
    tokens = draw(logits, None, torch.zeros(2, 3), np.array([3, 1]))
    best = logits.argmax(-1).tolist()
    assert tokens.tolist() == [best[:3], [best[3], 0, 0]]


def test_a_checkpoints_config_says_all_or_is_refused(tmp_path: Path) -> None:
    from adasim.real.asked import DRAFTERS

    good = json.loads((DRAFTERS / "smollm2-135m" / "config.json").read_text())
    config = tmp_path / "config.json"
    for text, message in (("{", "is no JSON"), ("[]", "holds no object")):
        config.write_text(text)
        with pytest.raises(InputError, match=message):
            read_config(tmp_path)
    del good["head_dim"], good["rope_theta"]
    config.write_text(json.dumps(good))
    with pytest.raises(InputError) as caught:
        read_shape(read_config(tmp_path), tmp_path)
    assert [p.rsplit(" ", 1)[1] for p in caught.value.problems] == ["head_dim", "rope_theta"]


def test_acceptance_stops_at_the_first_difference_and_at_the_cut() -> None:
    blocks = torch.tensor([[9, 1, 2, 3]] * 4)
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 7, 3, 4], [1, 2, 3, 4]])
    accepted = accept(blocks, target, torch.tensor([4, 2, 4, 1]))
    assert accepted.run.tolist() == [3, 1, 1, 0]
    assert accepted.token.tolist() == [4, 2, 7, 1]
    assert committed(blocks, accepted).tolist() == [[1, 2, 3, 4], [1, 2, 0, 0], [1, 7, 0, 0], [1, 0, 0, 0]]


def test_nothing_after_the_cut_is_looked_at() -> None:
    blocks, target = torch.randint(0, 3, (50, 6)), torch.randint(0, 3, (50, 6))
    lengths = torch.randint(1, 7, (50,))
    beyond = torch.arange(6) >= lengths[:, None]
    one = accept(blocks, target, lengths)
    other = accept(blocks.masked_fill(beyond, 7), target.masked_fill(beyond, 8), lengths)
    assert torch.equal(one.run, other.run)
    assert torch.equal(one.token, other.token)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_draws_keep_the_targets_distribution_wherever_the_cut(cut: int) -> None:
    """Greedy drafts 0, 0 against p = (.5, .3, .2) everywhere: the tokens that come out are draws from p."""
    p, n = torch.tensor([0.5, 0.3, 0.2]), 20_000
    draws = torch.multinomial(p.expand(n * 3, 3), 1, generator=torch.Generator().manual_seed(cut)).view(n, 3)
    accepted = accept(torch.zeros(n, 3, dtype=torch.long), draws, torch.full((n,), cut))
    tokens = committed(torch.zeros(n, 3, dtype=torch.long), accepted)
    first = Counter(tokens[:, 0].tolist())
    assert chisquare([first[i] for i in range(3)], (p * n).tolist()).pvalue > 1e-3
    went_on = accepted.run >= 1
    if cut > 1:
        second = Counter(tokens[went_on, 1].tolist())
        assert chisquare([second[i] for i in range(3)], (p * int(went_on.sum())).tolist()).pvalue > 1e-3


def test_a_bonus_is_the_last_token_committed() -> None:
    blocks = torch.randint(0, 3, (40, 5))
    accepted = accept(blocks, torch.randint(0, 3, (40, 5)), torch.randint(1, 6, (40,)))
    tokens = committed(blocks, Accepted(accepted.run, accepted.token))
    assert torch.equal(tokens.gather(1, accepted.run[:, None])[:, 0], accepted.token)


@pytest.mark.parametrize("vocab", [None, [0, 3, 4, 9, 11]], ids=["whole", "cut"])
def test_a_sharded_head_drafts_like_a_whole_one(vocab: list[int] | None) -> None:
    """Twelve tokens on three ranks; one of them holds a single draft token, one of them two."""
    weight, hidden = torch.randn(12, 8), torch.randn(30, 8)
    ids = None if vocab is None else torch.tensor(vocab)
    whole = DraftHead(weight, 0, ids)(hidden)
    logits = hidden @ weight.T
    if ids is not None:
        logits = torch.full_like(logits, float("-inf")).index_copy_(1, ids, logits[:, ids])
    assert torch.equal(whole.tokens, logits.argmax(-1))
    torch.testing.assert_close(whole.confidence, logits.softmax(-1).amax(-1))
    two = logits.topk(2).values
    torch.testing.assert_close(whole.lead, two[:, 0] - two[:, 1])

    ranks = [(weight[:4], 0), (weight[4:8], 4), (weight[8:], 8)]
    sent: list[list[Any]] = [[] for _ in ranks]
    for (rows, first), mine in zip(ranks, sent, strict=True):  # what each rank would send

        def record(x: Any, mine: list[Any] = mine) -> Any:
            mine.append(x)
            return torch.cat([x, x, x], -1)

        DraftHead(rows, first, ids, record)(hidden)
    turns = iter(zip(*sent, strict=True))
    joined = DraftHead(*ranks[1], ids, lambda _: torch.cat(next(turns), -1))
    together = joined(hidden)
    assert torch.equal(together.tokens, whole.tokens)
    torch.testing.assert_close(together.confidence, whole.confidence)
    torch.testing.assert_close(together.lead, whole.lead)


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    from adasim.real.asked import DRAFTERS

    served = DRAFTERS / "smollm2-135m"
    assert fitting(served, served).head
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "draft_vocab.npy"):
        (broken / name).write_bytes((served / name).read_bytes())
    (broken / "model.safetensors").write_bytes((served / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(InputError, match="cannot be read"):
        fitting(broken, served)
    other = tmp_path / "other"
    other.mkdir()
    for file in served.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    np.save(other / "draft_vocab.npy", np.arange(8192, dtype=np.int32))
    with pytest.raises(InputError, match="draft vocabulary is not the one of"):
        fitting(other, served)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("length_head.out.bias", None, "'length_head.out.bias' is missing"),
        ("length_head.extra", (1,), "'length_head.extra' is unknown"),
        ("length_head.out.bias", (2,), r"'length_head.out.bias' has shape \[2\], expected \[1\]"),
    ],
)
def test_another_head_is_refused_before_anything_is_sent(
    tmp_path: Path, name: str, size: tuple[int, ...] | None, says: str
) -> None:
    from safetensors.torch import load_file, save_file

    from adasim.real.asked import DRAFTERS

    served = DRAFTERS / "smollm2-135m"
    for file in served.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(served / "model.safetensors")
    weights = {k: w for k, w in weights.items() if k != name} | ({} if size is None else {name: torch.zeros(size)})
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=says):
        fitting(tmp_path, served)
