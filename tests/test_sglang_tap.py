"""What an SGLang server shows a trainer: bookkeeping of prompts, rounds and ends, and that it can harm nobody."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adasim.errors import InputError
from adasim.policies.fixed import Fixed
from adasim.real.sglang_plugin.decider import Decider
from adasim.real.sglang_plugin.rounds import Round, RoundLog
from adasim.real.sglang_plugin.settings import DOMAIN, ServedOpd, parse_opd
from adasim.types import DraftView, EngineCaps

torch = pytest.importorskip("torch")

from adasim.real.collect import Collector  # noqa: E402
from adasim.real.opd_process import Folder  # noqa: E402
from adasim.real.samples import read_samples  # noqa: E402
from adasim.real.sglang_plugin import tap as tap_file  # noqa: E402
from adasim.real.sglang_plugin.tap import Tap  # noqa: E402

VOCAB, WIDTH, BLOCK = 50, 3, 4


def request(name: str, prompt: list[int], output: list[int], domain: str | None = None) -> Any:
    """As much of SGLang's Req as is looked at."""
    said = SimpleNamespace(custom_params=None if domain is None else {DOMAIN: domain})
    return SimpleNamespace(
        rid=name, origin_input_ids=prompt, output_ids_through_stop=output, sampling_params=said, finished=lambda: False
    )


def states(positions: list[int]) -> Any:
    """Hidden states that say where they belong."""
    return torch.tensor(positions, dtype=torch.float32)[:, None].expand(-1, WIDTH).clone()


def sure_of(tokens: list[int]) -> Any:
    """Logits [n, V] of a target that is sure."""
    return 20.0 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def prepare(folder: Path) -> Folder:
    root = Folder(folder)
    root.buffers.mkdir(parents=True)
    root.settings.write_text(json.dumps({"domains": ["default", "code"]}))
    return root


def lines(folder: Folder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.served.read_text().splitlines()]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Tap]]:
    taps: list[Tap] = []

    def make(**fields: Any) -> Tap:
        taps.append(Tap(ServedOpd(folder=str(tmp_path / "opd"), **fields)))
        return taps[-1]

    yield make
    for made in taps:
        made.close()


def verify(tap: Tap, names: list[str], starts: list[int], accepted: list[int], lengths: list[int], **how: Any) -> None:
    """A round whose hidden states say their positions, and whose target expects 10 + position."""
    at = [start + i for start in starts for i in range(BLOCK)]
    whole = how.get("whole", [False] * len(names))
    logits = sure_of([10 + p for p in at])
    tap.round(names, np.array(starts), np.array(lengths), whole, how.get("version", 0), torch.tensor(accepted),
              states(at), logits)  # fmt: skip


def test_a_request_becomes_a_sample_whose_rows_are_its_tokens(opened: Callable[..., Tap], tmp_path: Path) -> None:
    """Prompts in two parts, one of them behind a prefix of 2 tokens in the cache; the last round comes after the end."""
    folder, tap = prepare(tmp_path / "opd"), opened(buffer=2)
    a = request("a", [1, 2, 3, 4, 5], [15, 16, 17, 18, 19, 20], "code")
    b = request("b", [1, 2, 6, 7], [14, 15], None)
    tap.prefill([a, b], [0, 2], states([0, 1, 2, 2, 3]), [3, 2], sure_of([13, 14]))
    tap.prefill([a], [3], states([3, 4]), [2], sure_of([15]))
    verify(tap, ["a", "b"], [5, 4], [2, 0], [4, 2])  # a: 16, 17, 18; b: 15
    verify(tap, ["a", "b"], [8, 5], [1, 1], [4, 2], version=1, whole=[True, False])  # a: 19, 20
    tap.finish("b")
    tap.finish("a")
    until((folder.buffers / "000001.npz").exists)
    second, first = read_samples(folder.buffers / "000001.npz")
    assert (first.lesson.text.domain, second.lesson.text.domain) == (1, 0)
    assert first.lesson.text.tokens.tolist() == [1, 2, 3, 4, 5, 15, 16, 17, 18, 19, 20]
    assert first.lesson.text.prompt_len == 5
    assert first.lesson.hidden_tensor()[:, 0].tolist() == [*range(10), 0]  # the last token was never run
    assert first.lesson.top_ids[4:10, 0].tolist() == [15, 15, 16, 17, 18, 19]
    assert (first.lesson.top_probs[4:10, 0] > 0.99).all()
    assert [(r.start, r.verify_len, r.accepted, r.version, r.whole) for r in first.rounds] == [
        (5, 4, 2, 0, False), (8, 4, 1, 1, True),
    ]  # fmt: skip
    assert second.lesson.text.tokens.tolist() == [6, 7, 14, 15]  # without what the cache knew
    assert second.lesson.text.prompt_len == 2
    assert second.lesson.hidden_tensor()[:3, 0].tolist() == [2, 3, 4]
    assert [(r.start, r.accepted) for r in second.rounds] == [(2, 0)]  # the round after its end is none
    assert lines(folder) == [
        {"begun": 0, "version": 0},
        {"begun": 1, "version": 0},
        {"finished": 1, "name": "b", "domain": "default", "tau": 1.0, "versions": [[0, 1]]},
        {"finished": 0, "name": "a", "domain": "code", "tau": 2.5, "versions": [[0, 1], [1, 1]]},
    ]


def test_a_request_that_came_back_begins_behind_what_others_had_run() -> None:
    """Evicted, it was prefilled again from further on than it had shown: a gap cannot be learnt across."""
    from adasim.real.collect import Shown

    samples: list[Any] = []
    collector = Collector(samples.append)

    def shown(count: int) -> Shown:
        return Shown(np.full((count, WIDTH), count, np.uint16), np.zeros((1, 8), np.uint16), np.zeros((1, 8), np.float16))

    collector.prefilled(0, shown(3), 0, 3)
    collector.prefilled(0, shown(2), 1, 3)  # known already
    collector.prefilled(0, shown(4), 6, 3)
    collector.finish(0, list(range(11)), 0)
    (sample,) = samples
    assert sample.lesson.text.tokens.tolist() == [6, 7, 8, 9, 10]
    assert sample.lesson.hidden[:, 0].tolist() == [4, 4, 4, 4, 0]


def short(tap: Tap, name: str) -> None:
    """A request of one round."""
    tap.prefill([request(name, [1, 2], [12, 13])], [0], states([0, 1]), [2], sure_of([12]))
    verify(tap, [name], [2], [0], [1])
    tap.finish(name)


def test_buffers_wait_for_a_trainer_and_the_newest_requests_count(opened: Callable[..., Tap], tmp_path: Path) -> None:
    tap = opened(buffer=2)
    for name in "abc":
        short(tap, name)
    until(lambda: tap.state()["dropped"] == 1)
    folder = prepare(tmp_path / "opd")
    until(lambda: tap.sent == 1)
    assert [s.lesson.text.index for s in read_samples(folder.buffers / "000001.npz")] == [1, 2]
    for name in "de":
        short(tap, name)
    until(lambda: tap.state()["waiting"] == 2)
    time.sleep(2 * tap_file.LOOK_S)
    assert tap.sent == 1  # the first buffer is not trained yet
    (folder.root / "versions" / "v000001").mkdir(parents=True)
    until(lambda: tap.sent == 2)
    assert [p.name for p in sorted(folder.buffers.iterdir())] == ["000002.npz"]  # nobody needs the first any longer


def test_prompts_that_end_at_once_are_not_kept_for_ever(opened: Callable[..., Tap]) -> None:
    """SGLang tells nothing of a request that ends with its first token."""
    tap = opened(buffer=8)
    for name in "abc":
        done = request(name, [1, 2], [12])
        done.finished = lambda: True
        tap.prefill([done], [0], states([0, 1]), [2], sure_of([12]))
    until(lambda: tap.state()["waiting"] == 2)
    assert len(tap._requests) == 1


def test_a_tap_that_fails_closes_and_serving_goes_on(opened: Callable[..., Tap]) -> None:
    tap = opened(buffer=2)
    short(tap, "a")
    tap.round(["b"], np.array([0]), np.array([1]), [False], 0, torch.tensor([0]), states([0]), sure_of([1]))  # unknown
    assert not tap.failed
    tap.prefill([request("c", [1], [2])], [0], states([0]), [1], torch.zeros(1, 2))  # fewer tokens than are kept
    assert "RuntimeError" in tap.state()["failed"]
    short(tap, "d")
    assert tap.state()["waiting"] <= 1


def test_requests_are_left_out_when_the_thread_lags(opened: Callable[..., Tap], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap_file, "BEHIND", -1)
    tap = opened(buffer=2)
    short(tap, "a")
    assert tap.state()["untapped"] == 1
    assert not tap._requests


def test_some_rounds_verify_whole_blocks_and_say_so() -> None:
    caps = EngineCaps(BLOCK - 1, 4)
    decider = Decider(Fixed(verify_len=2), caps, RoundLog(400))
    decider.full_verify_share, decider.version = 0.25, 7
    for _ in range(200):
        lengths = decider.draft_lens(["a", "b"], [9, 9])
        assert lengths.tolist() == [3 if w else 1 for w in decider.whole]
        assert decider.verify_lens(DraftView(lengths)).tolist() == [4 if w else 2 for w in decider.whole]
        decider.accepted([0, 0])
    rounds = [Round(*r) for r in decider.log.dump()["rounds"]]
    assert np.mean([r.whole for r in rounds]) == pytest.approx(0.25, abs=0.06)
    assert all([v == 4 for v in r.verify_lens] == r.whole for r in rounds)
    assert {r.draft_version for r in rounds} == {7}


def test_rounds_that_draft_nothing_stay_as_they_are() -> None:
    decider = Decider(Fixed(verify_len=1, draft_len=0), EngineCaps(BLOCK - 1, 4), RoundLog(4))
    decider.full_verify_share = 1.0
    assert decider.draft_lens(["a"], [9]).tolist() == [0]
    assert decider.verify_lens(DraftView(np.array([0]))).tolist() == [1]


def test_what_is_shown_is_checked() -> None:
    assert parse_opd("null", "x") is None
    found = parse_opd('{"folder": "/f", "keep": "/f", "buffer": 4}', "x")
    assert found == ServedOpd(folder="/f", keep="/f", buffer=4)
    with pytest.raises(InputError, match=r"x: .*keep: /g; allowed: null, or /f"):
        parse_opd('{"folder": "/f", "keep": "/g"}', "x")
    with pytest.raises(InputError, match="x: folder: is missing"):
        parse_opd("{}", "x")
