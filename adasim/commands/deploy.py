"""``adasim deploy``: what a server needs, and whether a new one is better than the old."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adasim.commands.canary import compare_servers
from adasim.commands.export import (
    Context,
    Domain,
    Drafter,
    DraftModel,
    MaxBatch,
    PolicyLabel,
    ProfileOf,
    shares_of,
)
from adasim.options import Json, Overwrite, Settings

if TYPE_CHECKING:
    from adasim.deploy.launch import Launch
    from adasim.deploy.memory import Needs
    from adasim.deploy.prediction import Prediction
    from adasim.exports.export import Export
    from adasim.exports.source import Source

SCRIPT, FACTS = "launch.sh", "deployment.json"
HEADS = {
    "output_tok_s": "tokens/s",
    "tpot_p50_ms": "TPOT ms",
    "ttft_p50_ms": "TTFT ms",
    "itl_p50_ms": "ITL ms",
    "throughput_ratio": "over plain",
}  # medians
CANARY_ONLY = ("--prompts", "--blocks", "--block-size", "--clients", "--tokens", "--timeout")


def deploy_command(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="A scenario or a profile; with --canary: a scenario.")
    ] = None,
    profile: ProfileOf = None,
    policy: PolicyLabel = None,
    target: Annotated[str, typer.Option(help="Target model, as the server is told.")] = "TARGET",
    draft_model: DraftModel = "DRAFTER",
    validation: Annotated[
        Path | None, typer.Option(help="Folder of adasim validate: how far off predictions were. Default: intervals.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="GPU, for memory; see adasim list hardware.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, for memory; see adasim list models.")] = None,
    draft_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the drafter, for memory. Default: the profile's, or 5.")
    ] = None,
    drafter: Drafter = None,
    context: Context = None,
    domain: Domain = None,
    max_batch: MaxBatch = None,
    canary: Annotated[
        tuple[str, str] | None, typer.Option(metavar="URL_A URL_B", help="Compare two live servers instead.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Canary: JSON lines with a prompt, or a folder of DOMAIN*.jsonl. Default: packaged."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=3, help="Canary: paired blocks, beside one of warm-up.")] = 10,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Canary: requests of a block. Default: four a client, at least 16.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Canary: requests at a time. Default: the scenario's, or 8.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Canary: output tokens. Default: the scenario's, or 256.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Canary: seconds of silence that fail a request.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: print.")] = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Print or write what SGLang needs to serve a policy with ADAFLASH; or compare two live servers.

    Writes launch.sh, adasim_policy.json, sps_table.json and deployment.json: flags, memory, the prediction and its error.

    With --canary the same requests go to both servers in alternating blocks; the verdict on B has an interval. Text is
    sent as it is, without a chat template, to outputs of the wanted length.

    Examples:

      adasim deploy dcut_h20 --hardware h20 --model qwen3-8b --target Qwen/Qwen3-8B --draft-model my_drafter --out served

      adasim deploy mine.yaml --profile mine_profile.yaml --policy head --validation reports/mine-validate

      adasim deploy mine.yaml --canary http://old:30000 http://new:30000 --blocks 12 --out reports/canary
    """
    from adasim.errors import InputError

    problems = [f"--out {out}: holds something; use --overwrite or another folder"] * (
        out is not None and not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir()))
    )
    if canary is not None:
        idle: dict[str, Any] = {
            "--profile": profile,
            "--policy": policy,
            "--validation": validation,
            "--hardware": hardware,
        }
        idle |= {"--model": model, "--draft-layers": draft_layers, "--drafter": drafter, "--context": context}
        idle |= {"--domain": domain, "--max-batch": max_batch}
        problems += [f"{name} has no effect with --canary" for name, value in idle.items() if value is not None]
        problems += ["--set has no effect without a scenario"] * (source is None and settings is not None)
        if problems:
            raise InputError(*problems)
        compare_servers(
            canary, source, settings or [], prompts=prompts, blocks=blocks, size=block_size, clients=clients,
            tokens=tokens, timeout_s=timeout, out=out, as_json=as_json,
        )  # fmt: skip
        return
    given = (
        prompts,
        None if blocks == 10 else blocks,
        block_size,
        clients,
        tokens,
        None if timeout == 120.0 else timeout,
    )
    problems += [f"{n} has no effect without --canary" for n, v in zip(CANARY_ONLY, given, strict=True) if v is not None]
    problems += ["deploy: give a scenario or a profile, or --canary URL_A URL_B"] * (source is None)
    if problems or source is None:
        raise InputError(*problems)
    from adasim.exports.source import Asked, read_source

    asked = Asked(profile, drafter, context, max_batch, shares_of(domain), settings or [])
    found = read_source(source, asked)
    _deploy(found, policy, target, draft_model, validation, (hardware, model, draft_layers), out, as_json=as_json)


def _deploy(
    source: "Source", label: str | None, target: str, draft_model: str, validation: Path | None,
    shape: tuple[str | None, str | None, int | None], out: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    from adasim.deploy.launch import launch
    from adasim.deploy.memory import needs, specs_of
    from adasim.deploy.prediction import predict, runs_of
    from adasim.exports import adaflash, sps
    from adasim.exports.formats import lengths, policy_of
    from adasim.screen import progress_bar

    memory = specs_of(source, *shape)
    needed = None if memory is None else needs(memory, source, source.max_batch)
    chosen = lengths(source, draft_block=source.one_pass)
    policy = policy_of(source, label)
    policy, exported = (
        (policy, adaflash.export(source, policy))
        if policy is not None
        else (made := adaflash.scheduled(source, chosen), adaflash.export(source, made, chosen))
    )
    start = launch(source, target, draft_model, needed)
    exports = [exported, sps.export(source)]
    runs = runs_of(source, validation)
    with progress_bar(runs, 0, quiet=as_json or not runs, what="simulations") as advance:
        predicted = predict(source, policy, validation, advance)
    facts = _facts(source, policy.label, start, needed, predicted, exports)
    if out is not None:
        _write(out, start, exports, facts)
    if as_json:
        from adasim.files import to_json

        typer.echo(to_json(facts), nl=False)
    else:
        _show(source, policy.label, start, needed, predicted, exports, out)


def _facts(
    source: "Source",
    policy: str,
    start: "Launch",
    needed: "Needs | None",
    predicted: "Prediction",
    exports: "list[Export]",
) -> dict[str, Any]:
    """Everything as one document."""
    from dataclasses import asdict

    return {
        "what": "a deployment planned by adasim: predictions are simulated, nothing was measured on this server",
        "from": source.about(),
        "policy": policy,
        "environment": start.environment,
        "flags": start.flags,
        "max_running_requests": source.max_batch,
        "memory_gib_per_gpu": None if needed is None else asdict(needed),
        "prediction": predicted.table.to_dict("records"),
        "error": {"of": predicted.how, "by_metric": predicted.errors},
        "notes": [*other_engine(source), *source.notes, *start.says, *predicted.notes],
        "limits": {e.file: list(e.says) for e in exports},
    }


def _write(out: Path, start: "Launch", exports: "list[Export]", facts: dict[str, Any]) -> None:
    from adasim.files import to_json, write_atomic

    out.mkdir(parents=True, exist_ok=True)
    for export in exports:
        export.write(out)
    write_atomic(out / FACTS, to_json(facts))
    write_atomic(out / SCRIPT, start.script)
    (out / SCRIPT).chmod(0o755)


def _show(
    source: "Source", policy: str, start: "Launch", needed: "Needs | None", predicted: "Prediction",
    exports: "list[Export]", out: Path | None,
) -> None:  # fmt: skip
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)

    def say(text: str = "") -> None:
        console.print(text, markup=False)

    say(f"{source.name}: {policy} on SGLang with ADAFLASH. Simulated; nothing was measured on this server.")
    if out is None:
        say(start.script)
        for export in exports:
            say(export.documents[export.file])
    for line in memory_lines(needed, source.max_batch):
        say(line)
    say()
    console.print(_table(predicted))
    say(f"error: {predicted.how}")
    of_exports = (line for export in exports for line in export.says)
    for line in [*other_engine(source), *source.notes, *start.says, *predicted.notes, *of_exports]:
        say(f"! {line}")
    if out is not None:
        say(f"Written: {out}/{SCRIPT}, {', '.join(n for e in exports for n in e.documents)}, {FACTS}")


def other_engine(source: "Source") -> list[str]:
    """Where the numbers come from, if not from the engine that is started."""
    if source.profile is None:
        return ["cost and acceptance are the scenario's own, not measured on this server"]
    identity, p = source.profile.identity, source.profile.provenance
    if identity is not None and identity.engine == "sglang":
        return []
    return [
        f"the prediction is for {p.engine} on {p.hardware}, where {source.profile.name} comes from, not for this SGLang"
    ]


def memory_lines(needed: "Needs | None", running: int) -> list[str]:
    """Memory in words: feasibility first."""
    if needed is None:
        return ["memory: unknown; give --hardware and --model (the cost does not say what was served on what)"]
    fits = needed.at_mean >= running
    verdict = f"{running} running requests fit at the mean context" if fits else (
        f"{running} running requests do NOT fit: {needed.at_mean} do at the mean context; the others wait"
    )  # fmt: skip
    lines = [
        f"memory, GiB a GPU of {needed.size:g}: target {needed.weights:.1f}, drafter {needed.drafter:.2f}, graphs and "
        f"activations {needed.reserved:.1f} (SGLang 0.5.23's rule), the rest KV cache: {needed.kv_tokens:,} tokens at "
        f"{needed.kv_gib_per_1k_tokens:.3f} GiB a thousand",
        verdict,
    ]
    if needed.at_longest is not None:
        lines[-1] += f"; {needed.at_longest} at the longest"
    return lines


def _table(predicted: "Prediction") -> Any:
    from rich.table import Table

    columns = list(predicted.table.columns)
    table = Table(*(HEADS.get(c, c.rsplit(".", 1)[-1]) for c in columns))
    for row in predicted.table.to_dict("records"):
        cells = [f"{v:.3g}" if isinstance(v, float) and abs(v) < 1e3 else f"{v:.0f}" if isinstance(v, float) else str(v)
                 for v in row.values()]  # fmt: skip
        table.add_row(*cells)
    errors = [predicted.errors.get(str(c), {}) for c in columns]
    if any(errors):
        table.add_section()
        table.add_row("± error", *[" ".join(f"{k} {v:.0%}" for k, v in e.items()) for e in errors[1:]])
    return table
