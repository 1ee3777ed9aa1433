"""The torch engine on a tiny random target: lossless for every policy, whatever memory and batch do."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from adasim.errors import InputError  # noqa: E402
from adasim.policies.adaspec import AdaSpec  # noqa: E402
from adasim.policies.base import Policy  # noqa: E402
from adasim.policies.dcut import DCut  # noqa: E402
from adasim.policies.driver import PolicyDriver  # noqa: E402
from adasim.policies.dspark import DSpark  # noqa: E402
from adasim.policies.exp3 import Exp3  # noqa: E402
from adasim.policies.fixed import Fixed  # noqa: E402
from adasim.policies.head import Head  # noqa: E402
from adasim.policies.off import Off  # noqa: E402
from adasim.policies.oracle import Oracle  # noqa: E402
from adasim.policies.rolling_off import RollingOff  # noqa: E402
from adasim.policies.schedule import Schedule  # noqa: E402
from adasim.policies.scheduler import (  # noqa: E402
    EmaAdmission,
    Fcfs,
    Scheduler,
    ShortestPredicted,
    SloAdmission,
    VerifyPacking,
)
from adasim.policies.sglang_ema import SGLangEma  # noqa: E402
from adasim.policies.sglang_throughput import SGLangThroughput  # noqa: E402
from adasim.policies.smartspec import SmartSpec  # noqa: E402
from adasim.policies.specdecpp import SpecDecPP  # noqa: E402
from adasim.policies.tetris import Tetris  # noqa: E402
from adasim.policies.threshold import Threshold  # noqa: E402
from adasim.policies.ucb1 import Ucb1  # noqa: E402
from adasim.policies.vllm_adaptive import VllmAdaptive  # noqa: E402
from adasim.real.collect import Collector  # noqa: E402
from adasim.real.draft import Drafter  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.engine import Engine  # noqa: E402
from adasim.real.features import score  # noqa: E402
from adasim.real.kv import Span  # noqa: E402
from adasim.real.layers import Arch  # noqa: E402
from adasim.real.length_head import make_head  # noqa: E402
from adasim.real.proposal import leads  # noqa: E402
from adasim.real.samples import Sample  # noqa: E402
from adasim.real.sampling import Forced, Sampling  # noqa: E402
from adasim.real.target import Target  # noqa: E402
from adasim.real.weights import random_target  # noqa: E402
from adasim.serving.admission import Admission  # noqa: E402
from adasim.serving.kv import KvMemory  # noqa: E402
from adasim.serving.recorder import Recorder  # noqa: E402
from adasim.types import BatchView, DraftView, EngineCaps, IntArray, Request  # noqa: E402

VOCAB, BLOCK = 40, 8
ARCH = Arch(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=VOCAB, max_context=256)
DRAFT = replace(ARCH, layers=2, qk_norm=True)


class Run(NamedTuple):
    engine: Engine
    texts: list[list[int]]  # output tokens by request


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(ARCH, seed=1)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    shape = DrafterShape(DRAFT, (0, 1), ARCH.layers, BLOCK, mask_token=0)
    return Drafter(shape, shape.fresh(0), target, torch.arange(0, VOCAB, 2))


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, rng.integers(3, 20)).tolist() for _ in range(count)]


def plain(target: Target, prompt: list[int], want: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """Reference: one request, one token at a time."""
    kv, tokens = target.cache(1, 256), list(prompt)
    fresh = tokens
    while len(tokens) - len(prompt) < want and (tokens == prompt or tokens[-1] not in eos):
        start = len(tokens) - len(fresh)
        hidden, _ = target.forward(torch.tensor(fresh), [Span(0, start, len(fresh))], kv)
        fresh = [int(target.logits(hidden[-1:]).argmax())]
        tokens = tokens + fresh
    return tokens[len(prompt) :]


def serve(
    target: Target, drafter: Drafter | None, policy: Policy, texts: list[list[int]], *, want: int = 24,
    running: int = 4, memory: KvMemory | None = None, eos: frozenset[int] = frozenset(),
    sampling: Sampling | None = None, scheduler: Scheduler | None = None, forced: Forced | None = None,
    collector: Collector | None = None, reloads: Sequence[Drafter] = (), full_verify_share: float = 0.0,
    between: Callable[[Engine], None] | None = None, domains: Sequence[str] = ("default",),
) -> Run:  # fmt: skip
    """Serve prompts to their end; requests take domains in turn. ``between`` is called after every step."""
    provides = frozenset({"survival", "accept_len", "margin", "cost"})
    caps = EngineCaps(BLOCK - 1, running, provides=provides, cost=TokenCost())
    requests = [Request(i, i % len(domains), len(p), want) for i, p in enumerate(texts)]
    admission = Admission(
        requests, np.zeros(len(texts), np.int64), scheduler or Fcfs(), memory or KvMemory(), caps
    )  # fmt: skip
    torch.manual_seed(0)
    engine = Engine(
        target, drafter, make_head("released", DRAFT.hidden), PolicyDriver(policy, caps), admission,
        Recorder(domains, BLOCK), texts, eos=eos, max_len=128, sampling=sampling or Sampling(), forced=forced,
        collector=collector, full_verify_share=full_verify_share,
    )  # fmt: skip
    for i in range(len(texts)):
        admission.submit(i, 0.0)
    finished, waiting = 0, list(reloads)
    while finished < len(texts):
        finished += len(engine.step())
        if waiting:
            engine.reload(waiting.pop(0), engine.head, engine.recorder.draft_version + 1)
        if between is not None:
            between(engine)
    return Run(engine, [engine.tokens[i][len(p) :] for i, p in enumerate(texts)])


class TokenCost:
    """Seconds as a policy might know them from a profile."""

    def round_s(self, batch: int, draft_positions: int, verified: int, context: float) -> float:
        return 1e-3 * (5 + 0.05 * verified + 0.01 * draft_positions)


class Ragged(Policy):
    """Lengths and drafts that vary by request and step."""

    kind: str = "ragged"

    def draft_lens(self, batch: BatchView) -> IntArray:
        return (batch.request_ids + batch.step) % BLOCK

    def verify_lens(self, batch: BatchView, draft: DraftView) -> IntArray:
        return np.minimum(1 + (3 * batch.request_ids + batch.step) % BLOCK, draft.draft_lens + 1)


POLICIES = [
    Off(), Fixed(verify_len=1), Fixed(verify_len=3), Fixed(verify_len=BLOCK), Head(), Threshold(), Ragged(),
    Tetris(drafts=9), VllmAdaptive(interval=3, warmup_refits=1),
]  # fmt: skip
LOOK_UP_OR_LEARN = [
    Schedule(drafts={1: 7, 3: 2, 4: 0}), Schedule(drafts={1: 3}, draft_block=True), RollingOff(window=4), SGLangEma(),
    Ucb1(), Exp3(), SGLangThroughput(interval=2), SmartSpec(off_bonus=0.5), AdaSpec(),
]  # fmt: skip
READ_CONFIDENCE = [
    Head(gamma={1: 2.0, 8: 0.5}), SpecDecPP(stop_above=0.99), DCut(), DSpark(), DSpark(stale_steps=2, stop="best"),
]  # fmt: skip


@pytest.mark.parametrize("policy", [*POLICIES, *LOOK_UP_OR_LEARN, *READ_CONFIDENCE], ids=lambda p: p.label)
def test_greedy_output_is_that_of_plain_decoding(target: Target, drafter: Drafter, policy: Policy) -> None:
    texts = prompts(7)
    run = serve(target, drafter, policy, texts)
    assert run.texts == [plain(target, p, 24) for p in texts]


@pytest.mark.parametrize(
    "policy", [Fixed(verify_len=BLOCK), *POLICIES[6:], *LOOK_UP_OR_LEARN, *READ_CONFIDENCE], ids=lambda p: p.label
)
def test_a_perfect_drafter_changes_nothing_but_the_number_of_rounds(target: Target, policy: Policy) -> None:
    """Drafts that are often right exercise acceptance, ends inside a block and EOS among drafts."""
    texts = prompts(6)
    eos = frozenset({plain(target, texts[0], 24)[9], plain(target, texts[1], 24)[4]})
    answers = [plain(target, p, 24, eos) for p in texts]
    run = serve(target, _Oracle(target, texts, answers), policy, texts, eos=eos)
    assert run.texts == answers
    assert sum(len(a) for a in answers) < 24 * len(texts), "no request ended early"
    accepted = run.engine.recorder.records(run.engine.admission.lives).steps["accepted"].sum()
    assert accepted > 0


class _Oracle(Drafter):
    """Drafts what will be said, except that every fifth position is wrong."""

    def __init__(self, target: Target, texts: list[list[int]], answers: list[list[int]]) -> None:
        shape = DrafterShape(DRAFT, (0, 1), ARCH.layers, BLOCK, mask_token=0)
        super().__init__(shape, shape.fresh(0), target)
        self.full = [p + a for p, a in zip(texts, answers, strict=True)]
        self.asked: deque[int] = deque()

    def draft(self, anchors, spans, kv):  # type: ignore[no-untyped-def]
        drafts = super().draft(anchors, spans, kv)
        self.asked.clear()
        for anchor, span in zip(anchors, spans, strict=True):
            text = next((t for t in self.full if len(t) > span.start and t[span.start] == anchor), [])
            self.asked += [
                (text[j] if j < len(text) and j % 5 else 0) for j in range(span.start + 1, span.start + span.length)
            ]
        return drafts

    def logits(self, hidden):  # type: ignore[no-untyped-def]
        logits = torch.zeros(len(hidden), VOCAB)
        logits[torch.arange(len(hidden)), torch.tensor(list(self.asked))] = 9.0
        return logits


@pytest.mark.parametrize(
    "scheduler", [Fcfs(), EmaAdmission(), VerifyPacking(verify_tokens=64), SloAdmission()], ids=lambda s: s.kind
)
def test_a_small_pool_sends_requests_back_and_changes_nothing(
    target: Target, drafter: Drafter, scheduler: Scheduler
) -> None:
    texts = prompts(6)
    run = serve(
        target, drafter, Fixed(verify_len=4), texts, memory=KvMemory(blocks=24, block_tokens=4), scheduler=scheduler
    )  # fmt: skip
    lives = run.engine.admission.lives
    assert run.texts == [plain(target, p, 24) for p in texts]
    assert sum(x.evictions for x in lives) > 0
    assert run.engine.admission.pool.used == 0
    records = run.engine.recorder.records(lives)
    chunks = records.requests["rounds"].sum() + sum(x.evictions for x in lives if x.tokens > 1)
    assert records.gaps["chunks"].sum() == chunks  # those who waited through an eviction are counted
    assert records.steps["kv_blocks"].max() > 20  # of 24, before spare slots are given back


def test_what_no_real_engine_knows_is_refused(target: Target, drafter: Drafter) -> None:
    """The truth about drafts, and a guess of how long answers will be."""
    with pytest.raises(InputError, match="oracle needs truth; the engine provides accept_len, cost, margin, survival"):
        serve(target, drafter, Oracle(), prompts(1))
    with pytest.raises(InputError, match="scheduler shortest needs predicted_len"):
        serve(target, drafter, Off(), prompts(1), scheduler=ShortestPredicted())


def test_margins_are_the_lead_of_the_likeliest_token() -> None:
    assert leads(torch.tensor([[1.0, 4.0, 2.5], [0.0, -1.0, -3.0]])).tolist() == [1.5, 1.0]


def test_batch_of_one_and_no_drafter(target: Target) -> None:
    texts = prompts(3)
    assert serve(target, None, Off(), texts, running=1).texts == [plain(target, p, 24) for p in texts]


def test_records_add_up(target: Target, drafter: Drafter) -> None:
    run = serve(target, drafter, Ragged(), prompts(5))
    records = run.engine.recorder.records(run.engine.admission.lives)
    steps, requests = records.steps, records.requests
    assert (requests["status"] == "finished").all()
    assert (requests["tokens"] == 24).all()
    assert steps["emitted"].sum() + steps["first_tokens"].sum() == requests["tokens"].sum()
    assert (steps["end_s"] >= steps["start_s"]).all()
    assert requests["verify_tokens"].sum() == steps["verify_tokens"].sum()
    parts = steps["draft_s"] + steps["verify_s"] + steps["overhead_s"] + steps["prefill_s"]
    assert np.allclose(parts, steps["end_s"] - steps["start_s"])


def test_forced_acceptance_accepts_exactly_that_many(target: Target, drafter: Drafter) -> None:
    run = serve(target, drafter, Fixed(verify_len=6), prompts(2), want=31, forced=Forced(lengths=[2]))
    steps = run.engine.recorder.records(run.engine.admission.lives).steps
    rounds = steps[steps["decoding"] > 0]
    assert (rounds["accepted"] == 2 * rounds["decoding"]).all()
    assert (rounds["emitted"] == 3 * rounds["decoding"]).all()


def test_reloading_the_drafter_changes_no_output(target: Target, drafter: Drafter) -> None:
    texts = prompts(5)
    others = [Drafter(drafter.shape, drafter.shape.fresh(seed), target, drafter.vocab) for seed in range(1, 9)]
    run = serve(target, drafter, Fixed(verify_len=5), texts, reloads=others)
    assert run.texts == [plain(target, p, 24) for p in texts]
    records = run.engine.recorder.records(run.engine.admission.lives)
    assert records.steps["draft_version"].max() == records.requests["draft_version"].max() == len(others)
    assert set(records.blocks["draft_version"]) <= set(range(len(others) + 1))
    assert records.blocks["blocks"].sum() == records.requests["rounds"].sum()


@pytest.mark.parametrize("memory", [None, KvMemory(blocks=24, block_tokens=4)], ids=["roomy", "evicting"])
def test_collected_samples_are_what_the_target_sees(target: Target, drafter: Drafter, memory: KvMemory | None) -> None:
    """Samples gathered during serving equal a fresh look of the target at the finished text."""
    texts = prompts(6)
    samples: list[Sample] = []
    run = serve(target, drafter, Ragged(), texts, collector=Collector(samples.append), memory=memory)
    assert len(samples) == len(texts)
    for sample in samples:
        text = sample.lesson.text
        assert text.tokens.tolist() == run.engine.tokens[text.index]
        assert text.prompt_len == len(texts[text.index])
        (fresh,) = score(target, drafter.shape.taps, [text])
        labelled = slice(text.prompt_len - 1, len(text.tokens) - 1)
        assert (sample.lesson.top_ids[labelled, 0] == text.tokens[text.prompt_len :]).all()
        np.testing.assert_allclose(sample.lesson.top_probs[labelled], fresh.top_probs[labelled], atol=2e-3)
        seen = sample.lesson.hidden_tensor()[:-1].float()
        torch.testing.assert_close(seen, fresh.hidden_tensor()[:-1].float(), rtol=2e-2, atol=2e-2)
        prefills = 1 + run.engine.admission.lives[text.index].evictions  # each gives a token, too
        assert sum(r.accepted + 1 for r in sample.rounds) >= len(text.tokens) - text.prompt_len - prefills


def test_rejected_rows_are_what_the_target_says_behind_the_rejected_drafts(target: Target, drafter: Drafter) -> None:
    """Kept for the paper's literal loss: the target's view of position i given the drafts before it, good or not."""
    samples: list[Sample] = []
    serve(target, drafter, Fixed(verify_len=BLOCK), prompts(3), collector=Collector(samples.append, rejected=True))
    kept = [r for s in samples for r in s.rounds if r.rejected is not None]
    assert kept
    for r in kept:
        assert r.rejected is not None
        assert len(r.rejected[0]) == len(r.rejected[1]) == r.verify_len - 1 - r.accepted
        assert ((r.rejected[1] >= 0) & (r.rejected[1] <= 1)).all()


def test_some_rounds_verify_the_whole_block_and_no_output_changes(target: Target, drafter: Drafter) -> None:
    texts = prompts(8)
    samples: list[Sample] = []
    run = serve(
        target, drafter, Fixed(verify_len=2), texts, collector=Collector(samples.append), full_verify_share=0.25
    )  # fmt: skip
    rounds = [r for s in samples for r in s.rounds]
    whole = [r for r in rounds if r.whole]
    assert {r.verify_len for r in whole} == {BLOCK}
    assert {r.verify_len for r in rounds if not r.whole} == {2}
    assert len(whole) / len(rounds) == pytest.approx(0.25, abs=0.1)
    assert run.texts == [plain(target, p, 24) for p in texts]
