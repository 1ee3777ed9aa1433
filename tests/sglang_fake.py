"""A server that speaks SGLang's HTTP interface as far as the backend uses it, around the plugin's own decider and player.

Its engine is made up: step times are real but tiny, and a block of a request accepts as many drafts as ``LUCK`` says.
"""

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any

import numpy as np
import pytest

from adasim import __version__
from adasim.errors import InputError
from adasim.policies.off import Off
from adasim.real.asked import config_sha256
from adasim.real.sglang_client import asking
from adasim.real.sglang_client.backend import SglangBackend
from adasim.real.sglang_plugin.decider import Decider, Moments
from adasim.real.sglang_plugin.orders import read_orders
from adasim.real.sglang_plugin.player import Player
from adasim.real.sglang_plugin.rounds import RoundLog
from adasim.real.sglang_plugin.settings import ServedOpd, Settings
from adasim.real.sglang_plugin.turn import Hold, Turn
from adasim.types import DraftView, EngineCaps, IntArray

LUCK = (0, 3, 1, 7, 2)  # drafts that would be accepted, round by round
STEP_S = 0.002


def target_in(folder: Path) -> str:
    """A target's folder, as far as anybody looks at it; the prompts for it are bytes, so that no tokenizer is loaded."""
    made = folder / "target"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 2048}))
    (made / "model.safetensors").write_bytes(b"weights")
    return str(made)


def read_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as bytes."""
    monkeypatch.setattr(asking, "chat_encoder", lambda target: (lambda text: list(text.encode()), frozenset({2})))


def fields(target: str, **changed: Any) -> dict[str, Any]:
    """Of a backend for a made-up server."""
    own = {"kind": "sglang", "target": target, "drafter": "smollm2-135m", "device": "cpu", "dtype": "float32"}
    return own | {"kv": {"blocks": 4096, "block_tokens": 1}, "ignore_eos": True, "max_running_requests": 4} | changed


class HostClock:
    """The host's, shifted."""

    def __init__(self, offset_s: float) -> None:
        self.offset_s = offset_s

    def now(self) -> float:
        return time.monotonic() + self.offset_s

    def known(self, mark: Any) -> bool:
        return True

    def seconds(self, mark: Any) -> float:
        return float(mark)


class Running:
    """One request."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.rid, self.body, self.prompt, self.done = str(body["rid"]), body, len(body["input_ids"]), 0
        self.want = int(body["sampling_params"]["max_new_tokens"])
        self.rounds = self.accepted = 0
        self.over, self.aborted = Event(), False


class FakeServer:
    """Serves until it is closed or dies.

    Args:
        backend: whose fields it resolves its arguments to.
        facts: of the plugin, that differ. Likewise ``info``, of ``/server_info``.
        settings: of the plugin.
        dies_after: finished requests after which it hangs up on everybody; None = never.
        offset_s: its clock's lead.
        metrics: keeps counters.
        turn: the file that holds it, as a client does whose servers take turns.
    """

    def __init__(
        self,
        backend: SglangBackend,
        *,
        facts: dict[str, Any] | None = None,
        info: dict[str, Any] | None = None,
        settings: Settings | None = None,
        dies_after: int | None = None,
        offset_s: float = 0.0,
        metrics: bool = True,
        turn: Path | None = None,
    ) -> None:
        caps = backend.caps()
        self.backend, self.dies_after, self.dead = backend, dies_after, False
        self.settings = settings or Settings(policy=Off(), experiments=True, kept_rounds=5000)
        self.clock = HostClock(offset_s)
        limits = EngineCaps(caps.max_draft_len, caps.max_running_requests, provides=frozenset({"survival", "accept_len"}))
        self.decider = Decider(self.settings.policy, limits, RoundLog(self.settings.kept_rounds), self.clock.now)
        self.turn, self.hold = Turn(turn), Hold(turn or Path(), lambda: not self.dead)
        self.player = Player(self.settings, self.decider, self.show)
        self.facts, self.info = facts or {}, info or {}
        self.counters = {"generation_tokens": 0, "prompt_tokens": 0} if metrics else None
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.finished, self.paused = 0, False
        self.held: Callable[[], bool] = lambda: False  # whether steps wait for something
        self.changed, self.luck = Condition(), count()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self._threads = [Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)]
        self._threads.append(Thread(target=self._engine, daemon=True))

    def __enter__(self) -> "FakeServer":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._die()
        self.http.shutdown()
        self.http.server_close()
        for thread in self._threads:
            thread.join(5)

    def _die(self) -> None:
        with self.changed:
            self.dead = True
            for r in (*self.waiting, *self.running):
                r.over.set()
            self.changed.notify_all()

    def _engine(self) -> None:
        while not self.dead:
            with self.changed:
                idle = not self.running and (not self.waiting or self.player.holds(len(self.waiting)))
                if idle or self.paused or self.held():
                    self.changed.wait(0.05)
                    continue
                self.turn.wait(self.decider.emitted)
                self.decider.queued = len(self.waiting)
                self.decider.kv_tokens = sum(r.prompt + r.done for r in self.running)
                (self._prefill if self.waiting and not self.player.holds(len(self.waiting)) else self._round)()
                for r in [r for r in self.running if r.done >= r.want or r.aborted]:
                    self._finish(r)
            time.sleep(0)

    def _prefill(self) -> None:
        places = self.backend.max_running_requests - len(self.running)
        new, self.waiting = self.waiting[:places], self.waiting[places:]
        self.player.let_in(len(self.waiting))
        begin = self.clock.now()
        time.sleep(STEP_S)
        lengths = [r.prompt for r in new]
        self.decider.prefilled([r.rid for r in new], lengths, lengths, Moments(begin, begin, begin, *self._end()))
        for r in new:
            r.done = 1
        self.running += new
        self.prefilled(new)

    def _round(self) -> None:
        begin = self.clock.now()
        drafts = self.decider.draft_lens([r.rid for r in self.running], [r.prompt + r.done for r in self.running])
        drafted = self.clock.now()
        needs, n = self.decider.driver.needs, len(drafts)
        curves = np.full((n, self.decider.caps.max_draft_len), 0.5) if "survival" in needs else None
        lengths = np.full(n, 3.2) if "accept_len" in needs else None
        verify = self.decider.verify_lens(DraftView(drafts, curves, lengths))
        verifying = self.clock.now()
        time.sleep(STEP_S)
        self.decider.timed(Moments(begin, drafted, verifying, *self._end()))
        forced, rng = self.player.forced, self.player.rng
        luck = [self.drawn() for _ in self.running]
        run = [
            min(k, v - 1) if forced is None else forced.run(v - 1, rng)
            for k, v in zip(luck, verify.tolist(), strict=True)
        ]
        self.verified(verify, run)
        self.decider.accepted(run)
        for r, k in zip(self.running, run, strict=True):
            r.done, r.rounds, r.accepted = min(r.done + k + 1, r.want), r.rounds + 1, r.accepted + k

    def _end(self) -> tuple[float, HostClock]:
        return self.clock.now(), self.clock

    def _finish(self, r: Running) -> None:
        self.running.remove(r)
        self.decider.forget(r.rid)
        if self.counters is not None:
            self.counters["generation_tokens"] += r.done
            self.counters["prompt_tokens"] += r.prompt
        self.finished += not r.aborted
        self.left(r)
        r.over.set()
        if self.finished == self.dies_after:
            self._die()

    def drawn(self) -> int:
        """Drafts that would be accepted of the next block."""
        return LUCK[next(self.luck) % len(LUCK)]

    def show(self, opd: ServedOpd) -> None:
        """This one shows a trainer nothing; nor do ``prefilled``, ``verified`` and ``left``."""
        raise InputError("nobody is shown anything")

    def prefilled(self, new: list[Running]) -> None:
        """Prompts were run."""

    def verified(self, verify_lens: IntArray, run: list[int]) -> None:
        """A round accepted so many drafts of each that runs."""

    def left(self, r: Running) -> None:
        """A request is done."""

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request; None = hang up."""
        if path == "/abort_request":
            self.abort(body["rid"])
            return {}
        return (self.generate if path == "/generate" else self.obey)(body)

    def generate(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """An answer; None = hang up."""
        r = Running(body)
        with self.changed:
            if self.dead:
                return None
            self.waiting.append(r)
            self.changed.notify_all()
        r.over.wait(30)
        if self.dead and r.done < r.want:
            return None
        meta = {
            "finish_reason": {"type": "abort", "message": "asked to"} if r.aborted else {"type": "length"},
            "completion_tokens": r.done, "prompt_tokens": r.prompt, "spec_verify_ct": r.rounds,
            "spec_num_correct_drafts": r.accepted,
        }  # fmt: skip
        return {"output_ids": [0] * r.done, "meta_info": meta}

    def abort(self, rid: str) -> None:
        """One request; what runs ends with its next step."""
        with self.changed:
            for r in [r for r in (*self.waiting, *self.running) if r.rid == rid]:
                r.aborted = True
                if r in self.waiting:
                    self.waiting.remove(r)
                    r.over.set()

    def obey(self, body: dict[str, Any]) -> list[bool]:
        """``/set_internal_state``."""
        self.player.refused = ""
        with self.changed:
            for name in body["server_args"]:
                try:
                    self.player.obey(read_orders(name), len(self.waiting) + len(self.running))
                except InputError as error:
                    self.player.refused = str(error)
            self.changed.notify_all()
        return [not self.player.refused]

    def server_info(self) -> dict[str, Any]:
        """``/server_info``."""
        backend, caps = self.backend, self.backend.caps()
        with self.changed:
            self.decider.settle()
            kept = self.decider.log.dump()
            own = {
                "now_s": self.clock.now(), "held": self.turn.held,
                "running": len(self.running), "waiting": len(self.waiting), "refused": self.player.refused,
                "adasim": __version__, "torch": "2", "python": "3.11.0",
                "device": backend.device, "hardware": "made up", "threads": backend.threads, "dtype": backend.dtype,
                "target_config_sha256": config_sha256(backend.target_folder()),
                "drafter_config_sha256": config_sha256(backend.draft_folder()), "block": caps.block,
                "max_running_requests": caps.max_running_requests, "captured_tokens": [],
                "kv_tokens": (backend.kv.blocks or 0) * backend.kv.block_tokens, "page_size": backend.kv.block_tokens,
                "policy": self.decider.driver.policy.model_dump(mode="json"), "provides": [],
                "experiments": self.settings.experiments, "kept_rounds": self.settings.kept_rounds,
                "next_step": self.decider.step, "draft_version": self.decider.version, "opd": None,
            }  # fmt: skip
        resolved = {
            "version": "0.5.23", "chunked_prefill_size": backend.max_prefill_tokens, "disable_radix_cache": True,
            "disable_overlap_schedule": not backend.lag_steps, "enable_mixed_chunk": False, "tp_size": 1,
        }  # fmt: skip
        return resolved | self.info | {"internal_states": [{"adasim": kept | own | self.facts}]}

    def metrics(self) -> str | None:
        """``/metrics``."""
        if self.counters is None:
            return None
        return "".join(f'sglang:{name}_total{{model_name="x"}} {n}.0\n' for name, n in self.counters.items())


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        answers: dict[str, Callable[[], Any]] = {"/server_info": self.fake.server_info, "/metrics": self.fake.metrics}
        self._answer(None if self.fake.dead else answers[self.path]())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.fake.post(self.path, body))

    def _answer(self, what: Any) -> None:
        if what is None and self.fake.dead:
            self.close_connection = True
            return
        data = (what if isinstance(what, str) else json.dumps(what)).encode()
        self.send_response(404 if what is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
