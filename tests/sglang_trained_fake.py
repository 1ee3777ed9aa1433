"""A made-up server whose drafter can be trained: the plugin's own tap, fed with made-up states, and changes of drafters.

Version 0 accepts what ``LUCK`` says, every other version nothing.
"""

from types import SimpleNamespace
from typing import Any

import torch

from adasim.real.drafter import DrafterShape
from adasim.real.sglang_plugin.settings import DOMAIN, ServedOpd
from adasim.real.sglang_plugin.tap import Tap
from adasim.types import IntArray
from tests.sglang_fake import FakeServer, Running

DONE = {"success": True, "message": "done", "ranks": [{"per_gpu_checksum": "t0"}]}


class TrainedServer(FakeServer):
    """Args: shape: of its drafter; refuses: answers of endpoints that would not."""

    def __init__(self, shape: DrafterShape, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shape = shape
        self.tap: Tap | None = None
        self.refuses: dict[str, str] = {}
        self.versions: list[str] = []  # that it was given
        self.domains: set[str] = set()  # that requests named
        self._reqs: dict[str, Any] = {}

    def drawn(self) -> int:
        return super().drawn() if self.decider.version == 0 else 0

    def show(self, opd: ServedOpd) -> None:
        if self.tap is not None:
            self.tap.close()
        self.tap = Tap(opd) if opd.enabled else None
        self.decider.full_verify_share = opd.full_verify_share if opd.enabled else 0.0

    def prefilled(self, new: list[Running]) -> None:
        self.domains |= {str((r.body["sampling_params"].get("custom_params") or {}).get(DOMAIN)) for r in new}
        if self.tap is None:
            return
        self._reqs |= {r.rid: _req(r) for r in new}
        hidden, logits = self._states(sum(r.prompt for r in new)), self._logits(len(new))
        self.tap.prefill([self._reqs[r.rid] for r in new], [0] * len(new), hidden, [r.prompt for r in new], logits)

    def verified(self, verify_lens: IntArray, run: list[int]) -> None:
        if self.tap is None:
            return
        starts = torch.tensor([r.prompt + r.done - 1 for r in self.running]).numpy()
        rows = len(run) * self.shape.block
        self.tap.round(
            [r.rid for r in self.running], starts, verify_lens, self.decider.whole.tolist(), self.decider.version,
            torch.tensor(run).minimum(torch.from_numpy(verify_lens) - 1), self._states(rows), self._logits(rows),
        )  # fmt: skip

    def left(self, r: Running) -> None:
        found = self._reqs.pop(r.rid, None)
        if found is not None and self.tap is not None:
            found.output_ids_through_stop = [1] * r.done
            self.tap.finish(r.rid)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        endpoint = path.removeprefix("/")
        if endpoint in ("generate", "abort_request", "set_internal_state"):
            return super().post(path, body)
        if endpoint in self.refuses:
            return DONE | {"success": False, "message": self.refuses[endpoint]}
        with self.changed:  # between two steps
            if endpoint in ("pause_generation", "continue_generation"):
                self.paused = endpoint == "pause_generation"
            if endpoint == "update_weights_from_tensor":
                assert self.paused
                self.versions.append(body["weight_version"])
                self.decider.version = int(body["weight_version"])
        return DONE

    def server_info(self) -> dict[str, Any]:
        found = super().server_info()
        found["internal_states"][0]["adasim"]["opd"] = None if self.tap is None else self.tap.state()
        return found | {
            "model_path": str(self.backend.target_folder()), "dtype": self.backend.dtype,
            "speculative_draft_model_path": str(self.backend.draft_folder()),
        }  # fmt: skip

    def _states(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, self.shape.arch.hidden * len(self.shape.taps))

    def _logits(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, self.shape.arch.vocab)


def _req(r: Running) -> Any:
    """As much of SGLang's Req as the tap looks at."""
    shape = SimpleNamespace(custom_params=r.body["sampling_params"].get("custom_params"))
    return SimpleNamespace(
        rid=r.rid, origin_input_ids=r.body["input_ids"], output_ids_through_stop=[], sampling_params=shape,
        finished=lambda: False,
    )  # fmt: skip
