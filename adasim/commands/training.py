"""The command that trains the drafter of a running server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adasim.options import INTERRUPTED, Json

if TYPE_CHECKING:
    from adasim.real.sglang_plugin.distillation import Distillation
    from adasim.records import EventRecord


def train_server_command(
    url: Annotated[str, typer.Argument(help="An SGLang server on this machine, with opd in its ADAFLASH settings.")],
    domains: Annotated[
        list[str] | None, typer.Option("--domain", help="A name that requests give as adasim_domain; repeatable.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Checkpoint to begin with. Default: what the server was started with.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="What clients sample with; replays of the buffers need to know.")
    ] = 0.0,
    key: Annotated[str, typer.Option(envvar="SGLANG_API_KEY", help="The server's key, if it asks for one.")] = "",
    as_json: Json = False,
) -> None:
    """Train a server's drafter on what it serves, and reload it while it serves; until interrupted."""
    import asyncio

    from adasim.errors import InputError

    try:
        from adasim.real.sampling import Sampling
        from adasim.real.sglang_plugin.distillation import Distillation
        from adasim.real.sglang_plugin.link import HttpLink
    except ImportError:
        raise InputError("train needs torch: pip install 'adasim[real]'") from None
    distillation = Distillation(HttpLink(url, key), domains or [], Sampling(temperature=temperature), start)
    try:
        asyncio.run(_watch(distillation, url, as_json=as_json))
    except KeyboardInterrupt:
        for note in distillation.notes():
            typer.echo(note, err=True)
        raise typer.Exit(INTERRUPTED) from None


async def _watch(distillation: "Distillation", url: str, *, as_json: bool) -> None:
    """Tell every event."""
    async with distillation as at:
        if not as_json:
            typer.echo(f"{url}: serves version 0; buffers and versions in {at.folder.root}")
        await at.tend(lambda: False, lambda event: typer.echo(_line(event, as_json=as_json)))


def _line(event: "EventRecord", *, as_json: bool) -> str:
    if as_json:
        from adasim.files import to_json

        return to_json(event._asdict()).strip()
    return f"{event.time_s:8.1f} s  {event.kind} version {event.draft_version} ({event.seconds:.2f} s) {event.detail}"
