"""Runs that measure costs: acceptance and contexts by decree, rounds of known shapes, models that stay loaded."""

import gc
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from adasim.lengths import FixedLength  # noqa: E402
from adasim.policies.fixed import Fixed  # noqa: E402
from adasim.policies.off import Off  # noqa: E402
from adasim.policies.probe import Probe, Shape  # noqa: E402
from adasim.real import loaded  # noqa: E402
from adasim.real.backend import TorchBackend  # noqa: E402
from adasim.real.checkpoint import Checkpoint, save_checkpoint  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.kv import KVCache, Span  # noqa: E402
from adasim.real.length_head import make_head  # noqa: E402
from adasim.real.loaded import keep_checkpoint, keep_ready, keep_target  # noqa: E402
from adasim.real.sampling import Forced, Sampling  # noqa: E402
from adasim.real.verify import accept_sampled  # noqa: E402
from adasim.real.weights import RANDOM, _publish, load_target  # noqa: E402
from adasim.workload import Closed  # noqa: E402

SHAPES = [
    Shape(draft_len=0, verify_len=1),
    Shape(draft_len=3, verify_len=4),
    Shape(draft_len=7, verify_len=4, ragged=True),
    Shape(draft_len=7, verify_len=4, reads=("accept_len",)),
]


def save_drafter(folder: Path, seed: int = 0) -> Path:
    arch = RANDOM["random-tiny"]
    shape = DrafterShape(replace(arch, layers=1, qk_norm=True), (0, 2), arch.layers, 8, 0)
    head = dict(make_head("paper", arch.hidden).state_dict())
    save_checkpoint(folder, Checkpoint(shape, shape.fresh(seed), torch.arange(0, arch.vocab, 2), head))
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter"))


def engine(drafter: Path, *, prefill: bool = False, **fields: Any) -> TorchBackend:
    forced = Forced(lengths=[1], prompts="random", prefill=prefill)
    return TorchBackend(target="random-tiny", drafter=str(drafter), forced=forced, ignore_eos=True, **fields)


def workload(output_len: int, prompt_len: int = 50) -> Closed:
    prompts, outputs = FixedLength(tokens=prompt_len), FixedLength(tokens=output_len)
    return Closed(concurrency=3, requests=3, domains={"chat": 1.0}, prompt_len=prompts, output_len=outputs)


def test_requests_stay_in_step_and_play_every_shape(drafter: Path) -> None:
    probe, passes = Probe(shapes=SHAPES), 3
    records = engine(drafter).run(workload(1 + 1 + passes * (1 + 2 + 2 + 2)), probe, 0)
    rounds = records.steps[records.steps["decoding"] > 0]
    assert (rounds["decoding"] == 3).all()
    assert (records.requests["status"] == "finished").all()
    played = probe.played(len(rounds))
    assert len(played) == 1 + passes * len(SHAPES)
    assert rounds["draft_tokens"].tolist() == [3 * s.draft_len for s in played]
    even = [not s.ragged for s in played]
    assert rounds["verify_tokens"][even].tolist() == [3 * s.verify_len for s in played if not s.ragged]
    assert records.rounds is not None
    asked = records.rounds.groupby("step")["accept_len"].agg(lambda lens: bool(lens.notna().all()))
    assert asked.tolist() == [bool(s.reads) for s in played]


def test_given_contexts_cost_no_prefill_and_are_as_long_as_asked(drafter: Path) -> None:
    steps = engine(drafter).run(workload(9, prompt_len=700), Off(), 0).steps
    first = steps.iloc[0]
    assert (first["prefill_tokens"], first["prefill_s"], first["first_tokens"]) == (0, 0.0, 3)
    assert first["overhead_s"] > 0
    assert steps["context"].tolist()[1:] == [701.0 + i for i in range(8)]
    computed = engine(drafter, prefill=True).run(workload(9, prompt_len=700), Off(), 0).steps
    assert computed["prefill_tokens"].tolist()[:2] == [1400, 700]  # whole prompts, up to 2048 tokens
    assert (computed["prefill_s"][:2] > 0).all()


def test_filled_memory_holds_values_where_asked_and_nowhere_else() -> None:
    kv = KVCache(RANDOM["random-tiny"], slots=3, max_len=10, dtype=torch.float32)
    kv.fill([Span(0, 0, 4), Span(2, 3, 2)])
    for layer in kv.layers:
        there = layer.abs().sum((0, 2, 4)) > 0  # [slots, max_len]
        assert there.int().tolist() == [[1] * 4 + [0] * 6, [0] * 10, [0] * 3 + [1] * 2 + [0] * 5]


def test_sampled_rounds_are_compared_before_the_decree(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else forced rounds would be cheaper than real ones."""
    compared = []

    def accept(*arguments: Any) -> Any:
        compared.append(arguments)
        return accept_sampled(*arguments)

    monkeypatch.setattr("adasim.real.engine.accept_sampled", accept)
    sampled = engine(drafter, sampling=Sampling(temperature=1.0))
    steps = sampled.run(workload(9), Fixed(verify_len=4), 0).steps
    rounds = steps[steps["decoding"] > 0]
    assert len(compared) == len(rounds) == 4
    assert (rounds["accepted"] == 3).all()


def test_plain_decoding_loads_no_drafter(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a drafter was loaded")

    monkeypatch.setattr(TorchBackend, "load_drafter", refuse)
    backend = TorchBackend(target="random-tiny", drafter=str(drafter))
    assert (backend.run(workload(5), Off(), 0).requests["tokens"] == 5).all()
    with pytest.raises(AssertionError, match="a drafter was loaded"):
        backend.run(workload(5), Fixed(verify_len=1, draft_len=0), 0)


def test_models_stay_loaded_until_their_files_change(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    target = keep_target("random-tiny", torch.float32, cpu)
    assert keep_target("random-tiny", torch.float32, cpu) is target
    assert keep_target("random-tiny", torch.bfloat16, cpu) is not target
    folder = save_drafter(tmp_path)
    found, made = keep_checkpoint(folder, torch.float32), keep_ready(folder, target)
    assert keep_checkpoint(folder, torch.float32) is found
    assert keep_ready(folder, target) is made
    save_drafter(tmp_path, seed=1)
    os.utime(folder / "model.safetensors", ns=(0, 0))  # clocks of file systems are coarse
    again = keep_checkpoint(folder, torch.float32)
    assert not np.array_equal(again.weights["fc.weight"].numpy(), found.weights["fc.weight"].numpy())
    assert keep_ready(folder, target) is not made


def test_what_is_kept_goes_before_another_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, folder = torch.device("cpu"), save_drafter(tmp_path)

    def keep() -> weakref.ref[Any]:
        target = keep_target("random-tiny", torch.float32, cpu)
        keep_ready(folder, target)
        return weakref.ref(target)

    alive: list[Any] = []
    old = keep()

    def load(*arguments: Any) -> Any:
        gc.collect()
        alive.append(old())
        return load_target(*arguments)

    monkeypatch.setattr(loaded, "load_target", load)
    keep_target("random-tiny", torch.bfloat16, cpu)
    assert alive == [None]


def test_a_folder_that_another_process_finished_first_is_taken(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    _publish(theirs, tmp_path / "out")
    _publish(mine, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "theirs"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").touch()
    with pytest.raises(OSError, match="not empty"):
        _publish(mine, tmp_path / "full")
