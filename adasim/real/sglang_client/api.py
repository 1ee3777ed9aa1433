"""SGLang's HTTP interface, as far as it is used here."""

import http.client
import json
import os
from typing import Any
from urllib.parse import urlsplit

from adasim.errors import InputError
from adasim.real.sglang_plugin.orders import Orders

KEY = "ADASIM_SGLANG_KEY"  # environment variable: the server's API key, where it asks for one
QUICK_S, LONG_S = 60.0, 3600.0  # timeouts of a question, of an answer to a prompt


class Gone(Exception):
    """The server cannot be reached, or hung up."""


class Refused(Exception):
    """The server answered with an error."""


class Api:
    """One server. Every call has a connection of its own, so that threads may share this.

    Args:
        url: like ``http://127.0.0.1:30000``.

    Raises:
        InputError: the URL is none.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise InputError(f"backend.url: {url!r}; expected something like http://127.0.0.1:30000")
        self.url = url.rstrip("/")
        self._parts, self._path = parts, parts.path.rstrip("/")
        key = os.environ.get(KEY)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def text(self, method: str, path: str, body: Any = None, timeout_s: float = QUICK_S) -> str:
        """An answer's text.

        Raises:
            Gone: no answer.
            Refused: an error as an answer.
        """
        made = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = made(self._parts.hostname, self._parts.port, timeout=timeout_s)
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), self._headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise Gone(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise Refused(f"{self.url}{path}: {answer.status}: {text[:500]}")
        return text

    def json(self, method: str, path: str, body: Any = None, timeout_s: float = QUICK_S) -> Any:
        """An answer's JSON; see ``text``."""
        text = self.text(method, path, body, timeout_s)
        try:
            return json.loads(text)
        except ValueError as error:
            raise Refused(f"{self.url}{path}: the answer is no JSON: {text[:200]}") from error

    def healthy(self) -> bool:
        """Whether it serves."""
        try:
            self.text("GET", "/health", timeout_s=QUICK_S)
        except (Gone, Refused):
            return False
        return True

    def info(self) -> dict[str, Any]:
        """``/server_info``: resolved arguments; under ``adasim`` what the plugin says of itself.

        Raises:
            InputError: the server has no ADAFLASH of this plugin, or several schedulers.
        """
        try:
            found: dict[str, Any] = self.json("GET", "/server_info")
        except Refused as error:
            raise InputError(f"{error}; is this SGLang?") from error
        states = found.get("internal_states") or []
        if len(states) != 1 or "adasim" not in states[0]:
            what = f"{len(states)} schedulers" if len(states) != 1 else "no round records in /server_info"
            raise InputError(
                f"{self.url}: {what}; needs one server with --speculative-algorithm ADAFLASH of adasim's plugin, dp 1"
            )
        return found | {"adasim": states[0]["adasim"]}

    def order(self, orders: Orders) -> None:
        """Give orders to the plugin.

        Raises:
            InputError: why it refuses.
        """
        (done,) = self.json("POST", "/set_internal_state", {"server_args": {orders.name(): 0}})
        if not done:
            said = self.info()["adasim"].get("refused") or "it does not say why"
            raise InputError(*(f"{self.url}: refused: {line}" for line in said.splitlines()))

    def generate(self, name: str, tokens: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt; comes back when all is there: ``output_ids`` and ``meta_info``."""
        body = {"rid": name, "input_ids": tokens, "sampling_params": sampling}
        answer: dict[str, Any] = self.json("POST", "/generate", body, LONG_S)
        return answer

    def abort(self, name: str) -> None:
        """End a request."""
        self.text("POST", "/abort_request", {"rid": name})

    def metrics(self) -> str | None:
        """Prometheus text; None = the server keeps none."""
        try:
            return self.text("GET", "/metrics")
        except Refused:
            return None
