"""``adasim export``: what a profile knows, in the formats that engines read."""

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim.options import Json, Overwrite, Settings

if TYPE_CHECKING:
    from adasim.exports.best_k import Rates
    from adasim.exports.export import Export
    from adasim.exports.source import Source

Where = Annotated[str, typer.Argument(metavar="SOURCE", help="A scenario or a profile; a name that both have: scenario.")]
ProfileOf = Annotated[
    str | None, typer.Option("--profile", help="Cost and acceptance for a scenario, in place of its own.")
]
Drafter = Annotated[str | None, typer.Option(help="One of the profile's drafters. Default: its own.")]
Context = Annotated[float | None, typer.Option(min=1, help="Mean context, tokens. Default: the scenario's, or 512.")]
MaxBatch = Annotated[int | None, typer.Option(min=1, help="Largest batch. Default: the scenario's, or 256.")]
Domain = Annotated[
    list[str] | None,
    typer.Option("--domain", metavar="NAME=SHARE", help="Share of output tokens; repeatable. Default: the scenario's."),
]
DraftModel = Annotated[str, typer.Option(help="Draft model, as the server is told.")]
PolicyLabel = Annotated[
    str | None, typer.Option("--policy", metavar="LABEL", help="For adaflash: a policy of the scenario. Default: best k.")
]
SHOWN = 12  # batches of the table on the terminal


def export_command(
    source: Where,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="FORMAT", help="vllm, sglang, sps, adaflash. Default: what fits."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: print.")] = None,
    profile: ProfileOf = None,
    policy: PolicyLabel = None,
    best_k: Annotated[
        Path | None,
        typer.Option("--best-k", help="A table of batch and k to write down: of adasim advise, or one you measured."),
    ] = None,
    drafter: Drafter = None,
    draft_model: DraftModel = "DRAFTER",
    method: Annotated[str | None, typer.Option(help="For vllm: its method. Default: dflash or eagle3.")] = None,
    context: Context = None,
    domain: Domain = None,
    max_batch: MaxBatch = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write what a profile knows for an engine: draft lengths by batch, step times, a policy.

    vllm: --speculative-config with a k for every range of batches. sglang: adaptive steps for EAGLE, with the flags. sps:
    step times for DSPARK's budget. adaflash: the policy of adasim's SGLang plugin.

    Each says what it was fitted on and where it extrapolates; what a format cannot express is said here.

    Examples:

      adasim export reports/cpu_validation/profile.yaml --domain code=0.7 --domain chat=0.3 --context 80

      adasim export dcut_h20 --to vllm --draft-model z-lab/Qwen3-8B-DFlash-b16 --out exported

      adasim export mine.yaml --profile mine_profile.yaml --to adaflash --policy head --out DRAFTER
    """
    from adasim.errors import InputError
    from adasim.exports.formats import Wanted, make
    from adasim.exports.source import Asked, read_source

    asked = Asked(profile, drafter, context, max_batch, shares_of(domain), settings or [])
    found = read_source(source, asked)
    exports, left_out = make(found, Wanted(tuple(to or ()), draft_model, method, policy, best_k))
    if out is not None:
        there = [out / name for e in exports for name in e.documents if (out / name).exists()]
        if there and not overwrite:
            raise InputError(*(f"{path}: exists; use --overwrite or another folder" for path in there))
        out.mkdir(parents=True, exist_ok=True)
        for export in exports:
            export.write(out)
    if as_json:
        show_json(found, exports, left_out, out)
    else:
        show(found, exports, left_out, out)


def shares_of(domains: list[str] | None) -> dict[str, float]:
    """Shares by name from NAME=SHARE.

    Raises:
        InputError: what is no share, or a name twice.
    """
    from math import inf

    from adasim.errors import InputError

    shares: dict[str, float] = {}
    problems = []
    for text in domains or []:
        name, _, value = text.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not name or not 0 < share < inf:
            problems.append(f"--domain {text}: must be NAME=SHARE, the share a number > 0")
        elif name in shares:
            problems.append(f"--domain {text}: {name} stands twice")
        shares[name] = share
    if problems:
        raise InputError(*problems)
    return shares


def as_json_document(source: "Source", exports: "list[Export]", left_out: list[str], out: Path | None) -> dict[str, Any]:
    """All of it as one document."""
    return {
        "from": source.about(),
        "best_k": [
            {"batch": r.batch, "k": r.k, "tok_s": r.best_tok_s, "gain": r.gain, "k_full_blocks": full.k}
            for r, full in _shown(source)
        ],
        "exports": [
            {"kind": e.kind, "file": e.file, "content": e.content, "flags": list(e.flags), "about": e.about,
             "limits": list(e.says)}
            for e in exports
        ],
        "left_out": left_out,
        "out": None if out is None else str(out),
    }  # fmt: skip


def show_json(source: "Source", exports: "list[Export]", left_out: list[str], out: Path | None) -> None:
    """Print one JSON document."""
    from adasim.files import to_json

    typer.echo(to_json(as_json_document(source, exports, left_out, out)), nl=False)


def show(source: "Source", exports: "list[Export]", left_out: list[str], out: Path | None) -> None:
    """Print the best lengths, what was written or would be, and what it cannot say."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    mix = ", ".join(f"{d} {s:.0%}" for d, s in source.shares.items())
    console.print(f"{source.name}: simulated, context {source.context:.0f} tokens, {mix}", markup=False)
    table = Table("batch", "best k", "tokens/s", "over k = 0", *["k of full blocks"] * source.one_pass)
    for r, full in _shown(source):
        gain = "not measured" if isnan(r.gain) else f"{r.gain:+.1%}"
        table.add_row(str(r.batch), str(r.k), f"{r.best_tok_s:.0f}", gain, *[str(full.k)] * source.one_pass)
    console.print(table)
    for note in source.notes:
        console.print(f"note: {note}", markup=False)
    for export in exports:
        console.print(f"\n{export.kind}", markup=False)
        for name, text in export.documents.items():
            if out is not None:
                console.print(f"  {out / name}", markup=False)
            elif name == export.file:
                console.print(text.rstrip(), markup=False)
        if export.content is not None and export.flags:
            console.print(f"  flags: {' '.join(export.flags)}", markup=False)
        for line in [f"extrapolates: {e}" for e in export.about.get("extrapolates", [])] + list(export.says):
            console.print(f"  ! {line}", markup=False)
    for line in left_out:
        console.print(f"note: {line}", markup=False)


def _shown(source: "Source") -> "list[tuple[Rates, Rates]]":
    """Doubling batches, as far as the cost covers them: drafting k tokens, and full blocks of which k are verified."""
    found, full = source.rates(), source.rates(draft_block=source.one_pass)
    known = {r.batch: (r, f) for r, f in zip(found, full, strict=True)}
    return [known[n] for n in sorted({*(2**i for i in range(SHOWN)), found[-1].batch}) if n in known]
