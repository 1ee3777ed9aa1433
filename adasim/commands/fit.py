"""``adasim fit``: cost and acceptance from a table of throughputs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from adasim.options import Json

Stated = Annotated[str, typer.Option(help="Kept in the profile.")]


def fit_command(
    table: Annotated[
        Path, typer.Argument(help="CSV: batch (or concurrency), k, tok_s; optionally accept_length, context.")
    ],
    out: Annotated[Path | None, typer.Option(help="The profile; default: the table's name, .yaml.")] = None,
    bonus: Annotated[
        Literal["counted", "not counted"] | None, typer.Option(help="Whether accept_length counts the bonus token.")
    ] = None,
    one_pass: Annotated[bool, typer.Option("--one-pass", help="The drafter fills its block in one pass.")] = False,
    source: Annotated[str | None, typer.Option(help="Who measured it.")] = None,
    hardware: Stated = "not stated",
    model: Stated = "not stated",
    engine: Stated = "not stated",
    date: Stated = "not stated",
    seed: Annotated[int, typer.Option(help="Of the draws behind the intervals.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the profile.")] = False,
    as_json: Json = False,
) -> None:
    """Fit cost and acceptance to tokens per second alone, as little as plain decoding and one speculative row."""
    from adasim.calibration.throughput_profile import as_yaml, calibrate_throughput
    from adasim.errors import InputError
    from adasim.files import to_json, write_atomic

    out = out or Path(f"{table.stem}.yaml")
    if out.exists() and not overwrite:
        raise InputError(f"--out {out}: exists; --overwrite replaces it")
    profile = calibrate_throughput(
        table,
        name=out.stem,
        source=source,
        hardware=hardware,
        model=model,
        engine=engine,
        date=date,
        bonus=bonus,
        one_pass=one_pass,
        seed=seed,
    )
    write_atomic(out, as_yaml(profile))
    if as_json:
        typer.echo(to_json(profile.model_dump(mode="json")), nl=False)
        return
    typer.echo(f"{out}: fitted to {profile.provenance.inputs[0]}")
    for line in profile.provenance.inputs[1:]:
        typer.echo(f"  {line}")
    for line in profile.provenance.assumptions:
        typer.echo(f"note: {line}")
