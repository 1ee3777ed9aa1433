"""On-policy distillation on the real SGLang: what verification shows trains the drafter, and nothing else changes."""

import asyncio
import json
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
from adasim.policies.fixed import Fixed
from adasim.real.features import score
from adasim.real.opd_process import Folder
from adasim.real.samples import Sample, read_samples
from adasim.real.sglang_plugin.distillation import Distillation
from adasim.real.sglang_plugin.link import EngineLink, HttpLink, Link
from adasim.real.sglang_plugin.settings import ServedOpd
from adasim.real.sglang_plugin.tap import DOMAIN
from adasim.real.weights import load_target
from tests.fake_trainer import FAKE
from tests.on_sglang.conftest import TEXTS, TOKENS
from tests.on_sglang.serving import DRAFTER, TARGET, Served, Server, copy_of

BLOCK, PATIENCE_S = 16, 300.0
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


def link(server: Server) -> EngineLink:
    return EngineLink(server.engine.tokenizer_manager)


def fake(how: str) -> list[str]:
    return [sys.executable, "-c", FAKE, how]


async def until(distillation: Distillation, kind: str) -> None:
    """Look after it until something happened."""
    end = time.monotonic() + PATIENCE_S
    while not any(e.kind == kind for e in distillation.events):
        assert time.monotonic() < end, [*distillation.events, distillation.folder.log.read_text()]
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
    damaged = copy_of(DRAFTER, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    for name in weights:
        if name.endswith(DAMAGE):
            weights[name].zero_()
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    show(server, tmp_path / "opd", buffer=len(prompts), positions="text", **LEARN)

    async def learn(distillation: Distillation) -> None:
        await until(distillation, "reload")

    distillation = Distillation(link(server), start=damaged)
    do(server, distillation.__aenter__())
    try:
        before = answer(server, prompts)
        do(server, learn(distillation))
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
    """Zeros pass every check. Over HTTP, as a server in another process is reached."""
    show(server, tmp_path / "opd", buffer=6, rollback=Rollback(requests=6))

    async def scenario(over: Link) -> list[str]:
        async with Distillation(over, command=fake("degraded")) as distillation:
            await serve()
            await until(distillation, "reload")
            await serve()
            await until(distillation, "rollback")
            return [e.kind for e in distillation.events]

    runs: list[list[list[int]]] = []

    async def serve() -> None:
        shapes = [{"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": {DOMAIN: d}}
                  for d in [*TEXTS] * 2]  # fmt: skip
        out = await server.engine.async_generate(input_ids=[*prompts] * 2, sampling_params=shapes)
        runs.append([o["output_ids"] for o in out])

    server.use(Fixed(verify_len=BLOCK))
    assert do(server, over_http(server, scenario)) == ["trained", "reload", "rollback"]
    assert runs == [plain.tokens * 2] * 2
    assert {r.draft_version for r in answer(server, prompts, tokens=4).rounds} == {0}


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
        return await scenario(HttpLink(f"http://127.0.0.1:{port}"))
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
