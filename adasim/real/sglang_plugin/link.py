"""How a running server is reached: from the process that holds its engine, or over HTTP from the same machine.

Only what a change of drafter needs. Importing this loads no SGLang.
"""

import asyncio
import base64
import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

from adasim.errors import InputError

Answer = tuple[bool, str]  # whether it was done, and what the server said
TIMEOUT_S = 120.0


class Served(NamedTuple):
    """What a server runs."""

    target: str
    drafter: Path
    dtype: str
    ranks: int
    opd: dict[str, Any] | None  # fields of ``ServedOpd``: what it shows a trainer


class Link(ABC):
    """One server. All methods raise InputError when it cannot be reached."""

    @abstractmethod
    async def served(self) -> Served:
        """What it runs."""

    @abstractmethod
    async def call(self, endpoint: str, /, **fields: Any) -> dict[str, Any]:
        """Do what SGLang's HTTP endpoint of that name does; its answer, with ``success`` and ``message``."""

    async def pause(self) -> None:
        """Let running requests wait where they are."""
        await self.call("pause_generation", mode="in_place")

    async def resume(self) -> None:
        """Let them go on."""
        await self.call("continue_generation", torch_empty_cache=False)

    async def begin(self) -> Answer:
        """Open an update of the drafter."""
        return _answer(await self.call("begin_weight_update", selector="draft"))

    async def update(self, payload: list[bytes], version: str) -> Answer:
        """Send tensors, one payload a rank."""
        fields = {"flush_cache": False, "selector": "draft", "weight_version": version}
        return _answer(await self.call("update_weights_from_tensor", serialized_named_tensors=payload, **fields))

    async def end(self) -> Answer:
        """Close the update."""
        return _answer(await self.call("end_weight_update"))

    async def target_checksum(self) -> str:
        """Of all weights of the target, on all ranks."""
        said = await self.call("weights_checker", action="checksum", selector="target")
        sums = [str(rank["per_gpu_checksum"]) for rank in said.get("ranks") or []]
        if not sums:
            raise InputError(f"the server gives no checksum of its target: {said.get('message')}")
        return " ".join(sums)


class EngineLink(Link):
    """Args: manager: the ``tokenizer_manager`` of an engine in this process."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def served(self) -> Served:
        """What the engine was made with."""
        args = self._manager.server_args
        shown = _shown(await self._manager.get_internal_state())
        return Served(args.model_path, Path(args.speculative_draft_model_path), str(args.dtype), args.tp_size, shown)

    async def call(self, endpoint: str, /, **fields: Any) -> dict[str, Any]:
        """Without HTTP."""
        from sglang.srt.managers import io_struct as io

        made, method = {
            "pause_generation": (io.PauseGenerationReqInput, self._manager.pause_generation),
            "continue_generation": (io.ContinueGenerationReqInput, self._manager.continue_generation),
            "begin_weight_update": (io.BeginWeightUpdateReqInput, self._manager.begin_weight_update),
            "update_weights_from_tensor": (
                io.UpdateWeightsFromTensorReqInput,
                self._manager.update_weights_from_tensor,
            ),
            "end_weight_update": (io.EndWeightUpdateReqInput, self._manager.end_weight_update),
            "weights_checker": (io.CheckWeightsReqInput, self._manager.check_weights),
        }[endpoint]
        answer: tuple[Any, ...] = await method(made(**fields)) or (True, "")
        return {"success": answer[0], "message": answer[1], "ranks": answer[2] if len(answer) > 2 else None}


class HttpLink(Link):
    """A server on this machine, whose shared memory it can see.

    Args:
        url: such as http://localhost:30000.
        key: the server's ``--admin-api-key`` or ``--api-key``; empty = it asks for none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url.rstrip("/"), key

    async def served(self) -> Served:
        """As ``/server_info`` says."""
        args = await asyncio.to_thread(self._ask, "server_info", None)
        draft = args.get("speculative_draft_model_path")
        if not draft:
            raise InputError(f"{self.url}: the server runs without a drafter")
        shown = _shown(args.get("internal_states") or [])
        return Served(args["model_path"], Path(draft), str(args["dtype"]), int(args["tp_size"]), shown)

    async def call(self, endpoint: str, /, **fields: Any) -> dict[str, Any]:
        """A POST; bytes go as base64."""
        body = {
            k: [base64.b64encode(part).decode() for part in v] if k == "serialized_named_tensors" else v
            for k, v in fields.items()
        }
        return await asyncio.to_thread(self._ask, endpoint, body)

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """POST a body, or GET where there is none. What the server refuses is an answer."""
        where = f"{self.url}/{path}"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(where, None if body is None else json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as got:
                text = got.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code != 400:
                raise InputError(f"{where}: HTTP {error.code}: {text[:200]}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"{where}: {error}") from error
        try:
            said = json.loads(text)
        except ValueError as error:
            raise InputError(f"{where}: no JSON: {text[:200]}") from error
        if not isinstance(said, dict):
            raise InputError(f"{where}: no JSON object: {text[:200]}")
        return said


def _answer(said: dict[str, Any]) -> Answer:
    return bool(said.get("success")), str(said.get("message", said))


def _shown(states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What a trainer is shown, by the server's internal states."""
    tap = next((s["adasim"].get("opd") for s in states if "adasim" in s), None)
    return None if tap is None else dict(tap["settings"])
