"""``adasim deploy --canary``: the same traffic to two live servers, and the verdict."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from adasim.options import FAILED, INTERRUPTED

if TYPE_CHECKING:
    from adasim.deploy.canary import Canary
    from adasim.deploy.client import Ask

CLIENTS, TOKENS, LEAST_SIZE = 8, 256, 16


def compare_servers(
    urls: tuple[str, str], source: str | None, settings: Sequence[str], *, prompts: Path | None, blocks: int,
    size: int | None, clients: int | None, tokens: int | None, timeout_s: float, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Send the traffic, write and show what came of it; exit code 1 where a server died.

    Raises:
        InputError: no such server, or traffic that cannot be made.
    """
    from adasim.deploy import canary as canaries
    from adasim.deploy.client import discover
    from adasim.errors import InputError
    from adasim.screen import progress_bar

    if urls[0].rstrip("/") == urls[1].rstrip("/"):
        raise InputError(f"--canary: both are {urls[0]}; a server is not compared with itself")
    asks, running = _traffic(source, settings, prompts, blocks, size, clients, tokens)
    problems: list[str] = []
    servers = []
    for url in urls:
        try:
            servers.append(discover(url, timeout_s))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    goal = "output_tok_s" if running else "tpot_p50_ms"  # in an open loop throughput says only what arrived
    canary = canaries.Canary((servers[0], servers[1]), goal)
    with progress_bar(2 * len(asks), 0, quiet=as_json, what="blocks") as advance:
        canaries.run(canary, asks, running, timeout_s, advance)
    facts = facts_of(canary, running, asks)
    if out is not None:
        _write(out, facts, canary)
    _show(canary, facts, out, as_json=as_json)
    if canary.stopped:
        raise typer.Exit(INTERRUPTED if canary.stopped.startswith("interrupted") else FAILED)


def _traffic(
    source: str | None, settings: Sequence[str], prompts: Path | None, blocks: int, size: int | None,
    clients: int | None, tokens: int | None,
) -> "tuple[list[list[Ask]], int | None]":  # fmt: skip
    """Blocks of requests, the first of them warm-up, and the clients of a closed loop (None: an open one)."""
    from adasim.deploy.traffic import of_file, of_scenario
    from adasim.plan import load
    from adasim.real.texts import PACKAGED

    if source is None:
        running = clients or CLIENTS
        number = size or max(4 * running, LEAST_SIZE)
        return of_file(prompts or PACKAGED, tokens or TOKENS, blocks + 1, number), running
    scenario = load(source, settings).scenario
    of_clients = clients or scenario.workload.clients
    number = size or max(4 * (of_clients or 0), LEAST_SIZE)
    asks = of_scenario(scenario, None if prompts is None else str(prompts), blocks + 1, number)
    if tokens is not None:
        asks = [[a._replace(tokens=tokens) for a in block] for block in asks]
    return asks, of_clients


def facts_of(canary: "Canary", clients: int | None, asks: "Sequence[Sequence[Ask]]") -> dict[str, Any]:
    """Everything as one document."""
    from dataclasses import asdict

    same, begins = canary.agreement
    return {
        "what": "measured: two live servers under the same requests, in alternating blocks",
        "verdict": canary.verdict,
        "servers": {side: asdict(s) for side, s in zip("AB", canary.servers, strict=True)},
        "traffic": {
            "loop": f"closed, {clients} clients" if clients else "open",
            "blocks": len(asks) - 1,
            "requests_per_block": len(asks[0]),
        },
        "metrics": [
            {"metric": c.metric, "A": c.a, "B": c.b, "gain_of_B": c.gain.estimate, "low": c.gain.low,
             "high": c.gain.high, "verdict": c.verdict}
            for c in canary.compared
        ],
        "outputs_alike": same,
        "beginnings_alike": begins,
        "failed": {side: len(canary.failures(side)) for side in "AB"},
        "warnings": canary.warnings,
    }  # fmt: skip


def _write(out: Path, facts: dict[str, Any], canary: "Canary") -> None:
    import pandas as pd

    from adasim.files import to_json, write_atomic

    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {"block": h.block, "side": h.side, "seconds": h.seconds, "requests": len(h.replies), "failed": len(h.failed)}
        | h.metrics
        for h in canary.halves
    ]
    write_atomic(out / "blocks.csv", pd.DataFrame(rows).to_csv(index=False))
    write_atomic(out / "canary.json", to_json(facts))


def _show(canary: "Canary", facts: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from adasim.deploy.canary import WORDS
    from adasim.files import to_json

    if as_json:
        typer.echo(to_json(facts), nl=False)
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"Verdict: {canary.verdict}", markup=False)
    table = Table("measured", "A", "B", "B over A, better above 0", "B is")
    for c in canary.compared:
        gain = f"{c.gain.estimate:+.1%} ({c.gain.low:+.1%} to {c.gain.high:+.1%})"
        table.add_row(WORDS[c.metric], f"{c.a:.4g}", f"{c.b:.4g}", gain, c.verdict)
    console.print(table)
    for side, server in zip("AB", canary.servers, strict=True):
        console.print(f"{side}: {server.url}, {server.api}, {server.model}", markup=False)
    for warning in canary.warnings:
        console.print(f"! {warning}", markup=False)
    if out is not None:
        console.print(f"Written: {out}/canary.json, {out}/blocks.csv", markup=False)
