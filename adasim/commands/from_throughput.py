"""``adasim calibrate --from-throughput``: a profile from tokens per second alone."""

from collections.abc import Sequence
from pathlib import Path

import typer


def from_throughput(paths: Sequence[Path], out: Path, settings: Sequence[str], *, overwrite: bool, as_json: bool) -> None:
    """Write the profile, and say what was fitted and what is left open.

    Args:
        paths: files that ``adasim import`` reads, and folders that it wrote.
        out: the profile, a .yaml file.
        settings: KEY=VALUE: only, concurrency, one_pass, or one of the profile's provenance.
        overwrite: replace the profile.
        as_json: print the profile instead of sentences.

    Raises:
        InputError: a setting that does not exist, or what is wrong with the files.
    """
    from adasim.calibration.throughput_profile import ABOUT, as_yaml, fitted_profile
    from adasim.errors import InputError
    from adasim.files import to_json, write_atomic

    allowed = ("only", "concurrency", "one_pass", *ABOUT)
    told = {name: value for name, _, value in (s.partition("=") for s in settings)}
    problems = [
        f"--set {k}={v}: allowed: {', '.join(allowed)} = a value" for k, v in told.items() if k not in allowed or not v
    ]
    one_pass, only = told.pop("one_pass", "false"), told.pop("only", None)
    problems += [f"--set one_pass={one_pass}: allowed: true, false"] * (one_pass not in {"true", "false"})
    load = told.pop("concurrency", None)
    if load is not None and not (load.isdecimal() and int(load)):
        problems.append(f"--set concurrency={load}: allowed: a whole number >= 1")
    problems += [f"--out {out}: must end in .yaml"] * (out.suffix not in {".yaml", ".yml"})
    problems += [f"--out {out}: exists; use --overwrite or another name"] * (out.exists() and not overwrite)
    if problems:
        raise InputError(*problems)
    batch = None if load is None else int(load)
    profile, _ = fitted_profile(paths, out.stem, about=told, only=only, concurrency=batch, one_pass=one_pass == "true")
    write_atomic(out, as_yaml(profile))
    if as_json:
        typer.echo(to_json(profile.model_dump(mode="json")), nl=False)
        return
    typer.echo(f"{out}: fitted to {profile.provenance.inputs[0]}")
    for line in profile.provenance.inputs[1:]:
        typer.echo(f"  {line}")
    for line in profile.provenance.assumptions:
        typer.echo(f"note: {line}")
