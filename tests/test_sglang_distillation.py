"""Who may give a running server another drafter, and when: without a server."""

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from adasim.calibration.rollback import Rollback
from adasim.cli import app
from adasim.errors import InputError

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from adasim.real.checkpoint import Checkpoint, save_checkpoint  # noqa: E402
from adasim.real.drafter import DrafterShape  # noqa: E402
from adasim.real.features import Lesson, bits, top_tokens  # noqa: E402
from adasim.real.samples import Round, Sample  # noqa: E402
from adasim.real.sglang_plugin.distillation import Distillation  # noqa: E402
from adasim.real.sglang_plugin.link import HttpLink, Link, Served  # noqa: E402
from adasim.real.sglang_plugin.settings import ServedOpd  # noqa: E402
from adasim.real.shards import Text  # noqa: E402
from adasim.real.weights import RANDOM  # noqa: E402

ARCH = replace(RANDOM["random-tiny"], layers=1, qk_norm=True)
SHAPE = DrafterShape(ARCH, (0, 1), 4, 8, 0)
FACTS = {"samples": 1, "train_s": 2.0, "steps": 1, "losses": [1.0, 0.5], "clipped": 0.0}
SWAP = [
    "pause_generation",
    "begin_weight_update",
    "update_weights_from_tensor",
    "end_weight_update",
    "continue_generation",
]
IDLE = (sys.executable, "-c", "import sys; sys.stdin.read()")


class Server(Link):
    """Does what it is told, or refuses it, and remembers."""

    def __init__(self, root: Path, **opd: Any) -> None:
        target, drafter = root / "target", root / "drafter"
        target.mkdir()
        (target / "config.json").write_text("{}")
        rows = {"model.embed_tokens.weight": torch.zeros(ARCH.vocab, ARCH.hidden)}
        save_file(rows, target / "model.safetensors")
        save_checkpoint(drafter, Checkpoint(SHAPE, SHAPE.fresh(0)))
        self.opd = ServedOpd(**{"folder": str(root / "opd"), "rollback": None, "keep": str(root / "opd")} | opd)
        self.says = Served(str(target), drafter, "float32", 1, self.opd.model_dump())
        self.calls: list[str] = []
        self.versions: list[str] = []
        self.refuses: dict[str, str] = {}
        self.checksum = "t0"

    async def served(self) -> Served:
        return self.says

    async def call(self, endpoint: str, /, **fields: Any) -> dict[str, Any]:
        self.calls.append(endpoint)
        if endpoint in self.refuses:
            return {"success": False, "message": self.refuses[endpoint]}
        if endpoint == "update_weights_from_tensor":
            self.versions.append(fields["weight_version"])
        if endpoint == "weights_checker":
            assert fields == {"action": "checksum", "selector": "target"}
            return {"success": True, "message": "", "ranks": [{"per_gpu_checksum": self.checksum}]}
        return {"success": True, "message": "done"}


def publish(at: Distillation, parent: int, **weights: Any) -> None:
    at.folder.versions.publish(Checkpoint(SHAPE, SHAPE.fresh(1) | weights), {"parent": parent, **FACTS})


def events(at: Distillation) -> list[tuple[str, int]]:
    return [(e.kind, e.draft_version) for e in at.events]


def tell(at: Distillation, *said: dict[str, Any]) -> None:
    with at.folder.served.open("a") as file:
        file.writelines(json.dumps(s) + "\n" for s in said)


def served(at: Distillation, first: int, version: int, taus: list[float]) -> None:
    """Requests that begin under a version, then all end."""
    tell(at, *({"begun": first + i, "version": version} for i in range(len(taus))))
    ends = [{"finished": first + i, "name": "", "domain": "code", "tau": t, "versions": []} for i, t in enumerate(taus)]
    tell(at, *ends)


def play(server: Server, scenario: Callable[[Distillation], Awaitable[None]], **how: Any) -> Distillation:
    async def run() -> Distillation:
        async with Distillation(server, command=IDLE, **how) as at:
            await scenario(at)
            return at

    return asyncio.run(run())


def test_a_version_is_sent_while_requests_wait_and_the_target_is_looked_at(tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def scenario(at: Distillation) -> None:
        assert server.calls == ["weights_checker", *SWAP, "weights_checker"]  # version 0 is what the judge calls so
        server.calls.clear()
        await at.poll()
        assert not server.calls
        publish(at, 0)
        await at.poll()
        assert server.calls == [*SWAP, "weights_checker"]

    at = play(server, scenario)
    assert server.versions == ["0", "1"]
    assert events(at) == [("trained", 1), ("reload", 1)]
    assert at.events[1].seconds > 0
    assert "trained on 1 requests in 2.0 s" in at.events[1].detail


def test_the_trainer_of_the_torch_engine_gets_what_it_needs(tmp_path: Path) -> None:
    """Its own process, on a buffer of the server: the version it makes is served."""
    server = Server(tmp_path, buffer=2, epochs=1)
    state = np.random.default_rng(0)

    async def run() -> None:
        async with Distillation(server) as at:
            text = Text(state.integers(0, ARCH.vocab, 20).astype(np.uint16), 4, 0, 0, 0)
            hidden = torch.randn(20, SHAPE.arch.hidden * 2)
            lesson = Lesson(text, bits(hidden), *top_tokens(torch.randn(20, ARCH.vocab)))
            at.folder.send(1, [Sample(lesson, [Round(5, 8, 2, 0), Round(8, 8, 0, 0)])] * 2, keep=True)
            while not at.events:
                await at.poll()
                await asyncio.sleep(0.05)
            assert events(at) == [("trained", 1), ("reload", 1)], at.events

    asyncio.run(run())
    assert server.versions == ["0", "1"]


def test_bad_versions_are_not_sent(tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def scenario(at: Distillation) -> None:
        publish(at, 0, **{"norm.weight": torch.full((ARCH.hidden,), float("nan"))})
        await at.poll()
        publish(at, 0, **{"norm.weight": torch.ones(ARCH.hidden - 1)})
        await at.poll()
        publish(at, 0)
        weights = at.folder.versions.folder / "v000003" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-9])
        await at.poll()

    at = play(server, scenario)
    assert server.versions == ["0"]
    assert events(at) == [("refused", 1), ("refused", 2), ("refused", 3)]
    for event, says in zip(at.events, ["not finite", "has shape [63], expected [64]", "checksum"], strict=True):
        assert says in event.detail


def test_what_the_server_refuses_is_not_in_use_and_nothing_is_built_on_it(tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def scenario(at: Distillation) -> None:
        publish(at, 0)
        server.refuses = {"update_weights_from_tensor": "no"}
        server.calls.clear()
        await at.poll()
        assert server.calls == SWAP  # opened, so closed; paused, so resumed
        server.refuses = {"begin_weight_update": "already open"}
        publish(at, 0)
        server.calls.clear()
        await at.poll()
        assert server.calls == [SWAP[0], SWAP[1], SWAP[4]]
        assert at.folder.base_version.read_text() == "0"
        server.refuses = {}
        publish(at, 1)
        publish(at, 0)
        await at.poll()
        assert at.keeper.current == 4

    at = play(server, scenario)
    assert [e for e in events(at) if e[0] != "trained"] == [("refused", 1), ("refused", 2), ("refused", 3), ("reload", 4)]
    assert [e.detail for e in at.events if e.kind == "refused"][:2] == ["no", "the server began no update: already open"]


def test_a_version_is_judged_by_requests_that_began_under_it_and_goes_when_it_accepts_less(tmp_path: Path) -> None:
    server = Server(tmp_path, rollback=Rollback(requests=4))

    async def scenario(at: Distillation) -> None:
        publish(at, 0)
        await at.poll()
        assert at.keeper.current == 0  # version 0 has to show first what it does
        served(at, 0, 0, [3.0, 3.1, 3.0, 3.1])
        await at.poll()
        assert at.keeper.current == 1
        served(at, 4, 0, [3.0, 3.0, 3.1, 3.1])  # told late, begun before: no news of version 1
        publish(at, 1)
        await at.poll()
        assert at.keeper.current == 1
        server.refuses = {"begin_weight_update": "busy"}
        served(at, 8, 1, [1.0, 1.1, 1.0, 1.1])
        for _ in range(3):
            await at.poll()
        server.refuses = {}
        await at.poll()

    at = play(server, scenario)
    assert server.versions == ["0", "1", "0"]
    assert events(at) == [("trained", 1), ("reload", 1), ("refused", 0), ("rollback", 0), ("refused", 2)]
    assert at.events[3].detail.startswith("ALARM: version 1: tau -2.000")
    assert at.folder.base_version.read_text() == "0"
    assert at.domains == ["default", "code"]


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    server = Server(tmp_path, rollback=Rollback(requests=4))

    async def scenario(at: Distillation) -> None:
        line = json.dumps({"finished": 0, "name": "", "domain": "math", "tau": None, "versions": []}) + "\n"
        for part in (line[:20], line[20:]):
            assert at.domains == ["default"]
            with at.folder.served.open("a") as file:
                file.write(part)
            await at.poll()
        assert at.domains == ["default", "math"]

    play(server, scenario)


def test_a_target_that_changed_stops_everything_but_serving(tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def scenario(at: Distillation) -> None:
        publish(at, 0)
        server.checksum = "t1"
        await at.poll()
        publish(at, 1)
        await at.poll()

    at = play(server, scenario)
    assert server.versions == ["0", "1"]
    assert events(at)[-1] == ("target_changed", 1)
    assert any("ALARM: the target's weights changed: checksum t0 became t1" in note for note in at.notes())


def test_a_dead_trainer_is_reported_once(tmp_path: Path) -> None:
    server = Server(tmp_path)

    async def run() -> Distillation:
        async with Distillation(server, command=(sys.executable, "-c", "raise SystemExit('no memory')")) as at:
            while not at.events:
                await at.poll()
            await at.poll()
            return at

    at = asyncio.run(run())
    assert events(at) == [("trainer_failed", 0)]
    assert any(
        "ALARM: the trainer failed, serving went on with version 0: exit code 1: no memory" in n for n in at.notes()
    )


def test_it_begins_with_another_drafter_when_asked(tmp_path: Path) -> None:
    server = Server(tmp_path)
    save_checkpoint(tmp_path / "other", Checkpoint(SHAPE, SHAPE.fresh(5)))

    async def scenario(at: Distillation) -> None:
        assert torch.equal(at.keeper.start.weights["fc.weight"], SHAPE.fresh(5)["fc.weight"].bfloat16())

    play(server, scenario, start=tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"opd": None}, "shows a trainer nothing; start it with opd in its settings"),
        ({"target": "nowhere"}, "no such folder with a config.json"),
        ({"drafter": Path("nowhere")}, "no such folder with a config.json"),
    ],
)
def test_a_server_that_cannot_be_trained_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    server = Server(tmp_path)
    server.says = server.says._replace(**change)
    with pytest.raises(InputError, match=says):
        play(server, _nothing)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path)
    play(server, _nothing)
    with pytest.raises(InputError, match=r"opd.folder: .* is not empty; move it away"):
        play(server, _nothing)


async def _nothing(at: Distillation) -> None:
    pass


class Front(BaseHTTPRequestHandler):
    """Answers as SGLang does."""

    answers: ClassVar[dict[str, tuple[int, str]]] = {}
    heard: ClassVar[list[tuple[str, str, Any]]] = []

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, body: Any) -> None:
        self.heard.append((self.path, self.headers.get("Authorization", ""), body))
        code, text = self.answers.get(self.path, (200, '{"success": true, "message": "done"}'))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url() -> Iterator[str]:
    Front.answers.clear()
    Front.heard.clear()
    front = HTTPServer(("127.0.0.1", 0), Front)
    thread = threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{front.server_port}"
    front.shutdown()
    thread.join()
    front.server_close()


def test_over_http_it_says_what_sglang_expects(url: str) -> None:
    link = HttpLink(url + "/", key="secret")
    info = {
        "model_path": "/t", "speculative_draft_model_path": "/d", "dtype": "bfloat16", "tp_size": 2,
        "internal_states": [{"adasim": {"opd": {"settings": {"folder": "/f"}}}}],
    }  # fmt: skip
    Front.answers["/server_info"] = 200, json.dumps(info)
    Front.answers["/begin_weight_update"] = 400, '{"success": false, "message": "already open"}'
    sums = [{"per_gpu_checksum": "a"}, {"per_gpu_checksum": "b"}]
    Front.answers["/weights_checker"] = 200, json.dumps({"success": True, "message": "", "ranks": sums})

    async def talk() -> None:
        assert await link.served() == Served("/t", Path("/d"), "bfloat16", 2, {"folder": "/f"})
        assert await link.begin() == (False, "already open")
        assert await link.update([b"\x00\xff"], "3") == (True, "done")
        assert await link.target_checksum() == "a b"
        await link.pause()
        await link.resume()

    asyncio.run(talk())
    assert {key for _, key, _ in Front.heard} == {"Bearer secret"}
    assert [(path, body) for path, _, body in Front.heard] == [
        ("/server_info", None),
        ("/begin_weight_update", {"selector": "draft"}),
        ("/update_weights_from_tensor", {"flush_cache": False, "selector": "draft", "weight_version": "3",
                                         "serialized_named_tensors": ["AP8="]}),
        ("/weights_checker", {"action": "checksum", "selector": "target"}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {"torch_empty_cache": False}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, "who are you"), "HTTP 401: who are you"),
        ((200, "<html>"), "no JSON: <html>"),
        ((200, "[]"), r"no JSON object: \[\]"),
        ((200, '{"model_path": "/t"}'), "runs without a drafter"),
    ],
)
def test_over_http_other_answers_are_errors(url: str, answer: tuple[int, str], says: str) -> None:
    Front.answers["/server_info"] = answer
    with pytest.raises(InputError, match=says):
        asyncio.run(HttpLink(url).served())


def test_the_command_says_why_it_cannot(url: str) -> None:
    for answer, says in (
        ((200, '{"model_path": "/t"}'), "runs without a drafter"),
        ((503, "starting"), "HTTP 503: starting"),
    ):
        Front.answers["/server_info"] = answer
        with pytest.raises(InputError, match=says):
            CliRunner().invoke(app, ["train", "server", url], catch_exceptions=False)


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match=r"http://127.0.0.1:9/server_info: .*refused"):
        asyncio.run(HttpLink("http://127.0.0.1:9").served())
