"""A trainer beside a run: what ``adasim train server`` runs, while a workload is sent. Loads torch."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from adasim.errors import InputError
from adasim.real.opd import Opd
from adasim.real.opd_process import COMMAND
from adasim.real.sampling import Sampling
from adasim.real.sglang_client.api import KEY, Api, Gone, Refused
from adasim.real.sglang_plugin.distillation import Distillation
from adasim.real.sglang_plugin.link import HttpLink
from adasim.real.sglang_plugin.orders import Orders
from adasim.real.sglang_plugin.settings import ServedOpd
from adasim.records import EventRecord


class Training:
    """Looks after a distillation on a thread of its own.

    Attributes:
        tap: how what the server shows had fared in the end, see ``Tap.state``.
        left: why the server is not as it was, once it is over; "" = it is.
    """

    def __init__(self, distillation: Distillation) -> None:
        self.distillation = distillation
        self.tap: dict[str, Any] = {}
        self.left = ""
        self._ready, self._over = Event(), Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Comes back when version 0 is served and the trainer runs.

        Raises:
            InputError: why they are not.
        """
        self._thread.start()
        while self._thread.is_alive() and not self._ready.wait(0.1):
            pass
        if not self._ready.is_set():
            self._join()

    def end(self) -> None:
        """End the trainer, and have version 0 served again."""
        self._over.set()
        if self._thread.ident is not None:
            self._join()

    def events(self, began_s: float) -> list[EventRecord]:
        """What happened, in seconds of a run that began then, monotonic."""
        later_s = self.distillation.began_s - began_s
        return [e._replace(time_s=max(e.time_s + later_s, 0.0)) for e in self.distillation.events]

    def notes(self) -> list[str]:
        """What a report must say."""
        said = self.distillation.notes(self.tap.get("dropped", 0))
        if untapped := self.tap.get("untapped"):
            said.append(f"distillation: {untapped} requests showed the trainer nothing: the server was too busy for it")
        if failed := self.tap.get("failed"):
            said.append(f"ALARM: the server stopped showing the trainer anything: {failed}")
        return said

    def _join(self) -> None:
        while self._thread.is_alive():  # unlike a bare join, Ctrl-C gets through
            self._thread.join(0.5)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            asyncio.run(self._train())
        except Exception as error:  # it belongs to who waits
            self._error = error

    async def _train(self) -> None:
        async with self.distillation as at:
            self._ready.set()
            try:
                await at.tend(self._over.is_set)
            finally:
                self.left = await at.restore()


@contextmanager
def trained(api: Api, opd: Opd, run: str, domains: Sequence[str], sampling: Sampling) -> Iterator[Training]:
    """Have a server's drafter trained on the requests that are sent meanwhile; nothing of it stays there.

    Args:
        api: a server that takes orders for experiments.
        run: names the folder under ``opd.keep``.

    Raises:
        InputError: the server shows a trainer nothing, or cannot be given drafters; or that run was kept already.
    """
    with opd.run_folder(run) as root:
        keep = None if opd.keep is None else str(root)
        shown = ServedOpd.model_validate(opd.model_dump() | {"folder": str(root), "keep": keep})
        link = HttpLink(api.url, os.environ.get(KEY, ""))
        training = Training(Distillation(link, domains, sampling, command=COMMAND))
        api.order(Orders(opd=shown))
        try:
            training.begin()
            yield training
        finally:
            try:
                training.end()
            finally:
                _hide(api, shown, training)


def _hide(api: Api, shown: ServedOpd, training: Training) -> None:
    """Have nothing shown any more."""
    try:
        training.tap = api.info()["adasim"]["opd"] or {}
        api.order(Orders(opd=shown.model_copy(update={"enabled": False})))
    except (Gone, Refused, InputError) as error:
        training.left = training.left or str(error)
