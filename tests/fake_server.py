"""Servers that answer like SGLang or an OpenAI-compatible one, at a speed that is known."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fake:
    """What a server does.

    Attributes:
        api: sglang or openai.
        model: what it says it serves.
        round_s: seconds of a round.
        drafts: accepted drafts of every round: each gives one token more.
        first_s: seconds until the first token.
        words: what it answers.
        dies_after: requests that it answers; later ones are cut off.
        asked: bodies of the requests, in order.
    """

    api: str = "sglang"
    model: str = "a-model"
    round_s: float = 0.004
    drafts: int = 1
    first_s: float = 0.002
    words: str = "word"
    dies_after: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    def chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Tokens and rounds so far, as time passes."""
        time.sleep(self.first_s)
        done, rounds = 1, 0
        yield done, rounds
        while done < tokens:
            time.sleep(self.round_s)
            done, rounds = min(done + 1 + self.drafts, tokens), rounds + 1
            yield done, rounds


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            known: dict[str, tuple[str, dict[str, Any]]] = {
                "/model_info": ("sglang", {"model_path": fake.model}),
                "/v1/models": ("openai", {"data": [{"id": fake.model}]}),
            }
            api, facts = known.get(self.path, ("", {}))
            self.send_response(200 if api == fake.api else 404)
            self.end_headers()
            self.wfile.write(json.dumps(facts).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.asked.append(body)
            if fake.dies_after is not None and len(fake.asked) > fake.dies_after:
                return  # closes the connection without an answer
            self.send_response(200)
            self.end_headers()
            tokens = body["sampling_params"]["max_new_tokens"] if fake.api == "sglang" else body["max_tokens"]
            for done, rounds in fake.chunks(tokens):
                self._say(done, rounds, tokens)
            self.wfile.write(b"data: [DONE]\n\n")

        def _say(self, done: int, rounds: int, tokens: int) -> None:
            if fake.api == "sglang":
                meta = {"completion_tokens": done, "spec_verify_ct": rounds}
                events: list[dict[str, Any]] = [{"text": fake.words * done, "meta_info": meta}]
            else:
                events = [{"choices": [{"text": fake.words}]}]
                if done == tokens:
                    events.append({"choices": [], "usage": {"completion_tokens": done}})
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
