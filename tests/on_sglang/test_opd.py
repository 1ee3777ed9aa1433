"""On-policy distillation on the real SGLang: what verification shows trains the drafter, and nothing else changes."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adasim.calibration.rollback import Rollback
from adasim.errors import InputError
from adasim.options import INTERRUPTED
from adasim.policies.fixed import Fixed
from adasim.real.features import score
from adasim.real.opd_process import Folder
from adasim.real.samples import Sample, read_samples
from adasim.real.sglang_plugin.distillation import Distillation
from adasim.real.sglang_plugin.link import EngineLink
from adasim.real.sglang_plugin.settings import DOMAIN, ServedOpd
from adasim.real.weights import load_target
from tests.fake_trainer import FAKE
from tests.on_sglang.conftest import TEXTS, TOKENS
from tests.on_sglang.serving import DRAFTER, TARGET, Served, Server, copy_of

BLOCK, SHORT, PATIENCE_S = 16, 12, 300.0
DAMAGE = "down_proj.weight"  # what is zeroed in a drafter that is to learn
LEARN = {"epochs": 8, "rate": 3e-4, "accumulate": 1, "blocks": 16}


def do(server: Server, what: Awaitable[Any]) -> Any:
    return server.engine.loop.run_until_complete(what)


def answer(server: Server, prompts: Sequence[list[int]], tokens: int = TOKENS, verify_len: int = BLOCK) -> Served:
    """All at once, each under the domain of its text."""
    shapes = [
        {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": {DOMAIN: domain}}
        for domain, _ in zip([*TEXTS] * len(prompts), prompts, strict=False)
    ]
    server.use(Fixed(verify_len=verify_len))
    known = server.rounds()
    seen = known[-1].step if known else -1
    out = server.engine.generate(input_ids=list(prompts), sampling_params=shapes)
    rounds = [r for r in server.rounds() if r.step > seen]
    return Served([o["output_ids"] for o in out], [o["meta_info"] for o in out], rounds)


def tau(run: Served) -> float:
    rounds = sum(m["spec_verify_ct"] for m in run.meta)
    return 1 + sum(m["spec_num_correct_drafts"] for m in run.meta) / rounds


def show(server: Server, folder: Path, **fields: Any) -> ServedOpd:
    """Let the server show a trainer its rounds from now on."""
    fields = {"full_verify_share": 0.0, "rollback": None} | fields
    opd = ServedOpd(folder=str(folder), **fields)
    server.engine.collective_rpc("adasim_opd", settings=opd.model_dump_json())
    return opd


@pytest.fixture(autouse=True)
def _as_it_was(server: Server) -> Iterator[None]:
    server.engine.flush_cache()
    yield
    server.engine.collective_rpc("adasim_opd", settings="null")
    from adasim.real.sglang_plugin.reload import reload_drafter

    do(server, reload_drafter(server.engine.tokenizer_manager, DRAFTER, "shipped"))


def damaged(folder: Path, ending: str) -> Path:
    """The shipped drafter with zeros in the tensors of these names."""
    copy_of(DRAFTER, folder)
    weights = load_file(folder / "model.safetensors")
    for name, w in weights.items():
        if name.endswith(ending) and not name.startswith("length_head"):
            w.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def link(server: Server) -> EngineLink:
    return EngineLink(server.engine.tokenizer_manager)


def fake(how: str) -> list[str]:
    return [sys.executable, "-c", FAKE, how]


async def until(distillation: Distillation, kind: str) -> None:
    """Look after it until something happened."""
    end = time.monotonic() + PATIENCE_S
    while not any(e.kind == kind for e in distillation.events):
        assert time.monotonic() < end, distillation.events
        assert kind == "trainer_failed" or not distillation.notes()[1:], distillation.folder.log.read_text()
        await distillation.poll()
        await asyncio.sleep(0.1)


def wait_for(path: Path) -> Path:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)
    return path


def samples_of(server: Server, folder: Path, prompts: Sequence[list[int]], **fields: Any) -> list[Sample]:
    """What the server shows of requests, with nobody who trains on it."""
    root = Folder(folder)
    root.buffers.mkdir(parents=True)
    root.settings.write_text(json.dumps({"domains": ["default", *TEXTS]}))
    show(server, folder, buffer=len(prompts), **fields)
    answer(server, prompts, verify_len=4)
    return read_samples(wait_for(root.buffers / "000001.npz"))


def test_samples_are_what_the_target_sees(
    server: Server, prompts: list[list[int]], plain: Served, tmp_path: Path
) -> None:
    """Against a fresh look of the torch engine's target; the second time, the prefix cache knows most of a prompt."""
    target = load_target(TARGET, torch.float32)
    taps = json.loads((DRAFTER / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    for name, again in (("first", False), ("again", True)):
        samples = samples_of(server, tmp_path / name, prompts, full_verify_share=0.5)
        assert sorted(s.lesson.text.domain for s in samples) == [1, 2, 3]
        for sample in samples:
            text = sample.lesson.text
            whole = [*prompts[text.domain - 1], *plain.tokens[text.domain - 1]]
            first = len(whole) - len(text.tokens)
            assert text.tokens.tolist() == whole[first:]
            assert text.prompt_len == max(len(prompts[text.domain - 1]) - first, 1)
            assert (first > 0) == again
            if again:
                continue  # without its beginning a text is another one for the target
            (fresh,) = score(target, taps, [text])
            labelled = slice(text.prompt_len - 1, len(text.tokens) - 1)
            assert (sample.lesson.top_ids[labelled, 0] == text.tokens[text.prompt_len :]).all()
            torch.testing.assert_close(
                torch.from_numpy(sample.lesson.top_probs[labelled]).float(),
                torch.from_numpy(fresh.top_probs[labelled]).float(), rtol=0, atol=2e-3,
            )  # fmt: skip
            seen, known = sample.lesson.hidden_tensor()[:-1].float(), fresh.hidden_tensor()[:-1].float()
            torch.testing.assert_close(seen, known, rtol=2e-2, atol=2e-2 * float(known.abs().max()))
        rounds = [r for s in samples for r in s.rounds]
        assert {r.verify_len for r in rounds if not r.whole} == {4}
        assert {r.verify_len for r in rounds if r.whole} == {BLOCK}


def test_a_drafter_learns_while_it_serves(
    server: Server, prompts: list[list[int]], plain: Served, tmp_path: Path
) -> None:
    """A damaged drafter accepts more after one round of training on what it served; the tokens stay the target's."""
    show(server, tmp_path / "opd", buffer=len(prompts), positions="text", **LEARN)

    distillation = Distillation(link(server), start=damaged(tmp_path / "damaged", DAMAGE))
    do(server, distillation.__aenter__())
    try:
        before = answer(server, prompts)
        do(server, until(distillation, "reload"))
        server.engine.flush_cache()  # what the damaged drafter knew of prompts
        after = answer(server, prompts)
    finally:
        do(server, distillation.__aexit__(None, None, None))
    assert before.tokens == after.tokens == plain.tokens
    assert tau(after) > tau(before) + 0.3
    assert [(e.kind, e.draft_version) for e in distillation.events] == [("trained", 1), ("reload", 1)]
    assert {r.draft_version for r in before.rounds} == {0}
    assert {r.draft_version for r in after.rounds} == {1}
    assert not distillation.failed  # the target's checksum is what it was


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("crash", "trainer_failed", "RuntimeError: out of memory"),
        ("truncated", "refused", "checksum"),
        ("nan", "refused", "not finite"),
    ],
)
def test_a_broken_trainer_never_reaches_the_server(
    server: Server, prompts: list[list[int]], plain: Served, tmp_path: Path, how: str, kind: str, says: str
) -> None:
    show(server, tmp_path / "opd", buffer=1)
    distillation = Distillation(link(server), command=fake(how))
    do(server, distillation.__aenter__())
    try:
        answer(server, prompts[:1], tokens=3)
        do(server, until(distillation, kind))
        run = answer(server, prompts, tokens=4)
    finally:
        do(server, distillation.__aexit__(None, None, None))
    (event,) = distillation.events
    assert says in event.detail
    assert distillation.keeper.current == 0
    assert {r.draft_version for r in run.rounds} == {0}
    assert run.tokens == [t[:4] for t in plain.tokens]


def test_a_version_that_accepts_less_is_rolled_back(
    server: Server, prompts: list[list[int]], plain: Served, tmp_path: Path
) -> None:
    """Zeros pass every check. The same prompts under both versions, so that four requests a domain can tell."""
    show(server, tmp_path / "opd", buffer=6, rollback=Rollback(requests=6))
    distillation = Distillation(link(server), command=fake("degraded"))
    do(server, distillation.__aenter__())
    try:
        runs = [answer(server, [*prompts] * 2, SHORT)]
        do(server, until(distillation, "reload"))
        runs.append(answer(server, [*prompts] * 2, SHORT))
        do(server, until(distillation, "rollback"))
        runs.append(answer(server, [*prompts] * 2, SHORT))
    finally:
        do(server, distillation.__aexit__(None, None, None))
    assert [e.kind for e in distillation.events] == ["trained", "reload", "rollback"]
    assert "ALARM: version 1: tau -" in distillation.events[2].detail
    assert [{r.draft_version for r in run.rounds} for run in runs] == [{0}, {1}, {0}]
    assert [run.tokens for run in runs] == [[t[:SHORT] for t in plain.tokens] * 2] * 3
    assert tau(runs[1]) < tau(runs[0]) - 0.3
    assert tau(runs[2]) == pytest.approx(tau(runs[0]))


def test_another_process_gives_drafters_over_http(
    server: Server, prompts: list[list[int]], plain: Served, tmp_path: Path
) -> None:
    """``adasim train server`` begins with a drafter that accepts nothing: it arrives, and no token changes."""
    empty = damaged(tmp_path / "empty", ".weight")
    show(server, tmp_path / "opd")
    command = [sys.executable, "-m", "adasim", "train", "server"]

    async def scenario(url: str) -> tuple[str, int]:
        process = await asyncio.create_subprocess_exec(
            *command, url, "--start", str(empty), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        return line.decode(), await process.wait()

    said, code = do(server, over_http(server, scenario))
    assert said.startswith("http://127.0.0.1:")
    assert "serves version 0" in said
    assert code == INTERRUPTED
    run = answer(server, prompts, tokens=8)
    assert tau(run) == 1
    assert run.tokens == [t[:8] for t in plain.tokens]


async def over_http(server: Server, scenario: Any) -> Any:
    """SGLang's own HTTP server, around the engine of this session."""
    import uvicorn
    from sglang.srt.entrypoints import http_server

    info = server.engine._scheduler_init_result.scheduler_infos[0]
    state = http_server._GlobalState(server.engine.tokenizer_manager, server.engine.template_manager, info)
    http_server.set_global_state(state)
    front = uvicorn.Server(uvicorn.Config(http_server.app, port=0, log_level="error", lifespan="off"))
    running = asyncio.create_task(front.serve())
    while not front.started:
        await asyncio.sleep(0.05)
    port = front.servers[0].sockets[0].getsockname()[1]
    try:
        return await scenario(f"http://127.0.0.1:{port}")
    finally:
        front.should_exit = True
        await running


def test_who_trains_must_be_asked_for(server: Server, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shows a trainer nothing"):
        do(server, Distillation(link(server)).__aenter__())
    show(server, tmp_path / "opd")
    (tmp_path / "opd" / "old").mkdir(parents=True)
    with pytest.raises(InputError, match="not empty"):
        do(server, Distillation(link(server)).__aenter__())
    with pytest.raises(AssertionError, match="disable-radix-cache"):
        show(server, tmp_path / "rerun", teacher="rerun")
