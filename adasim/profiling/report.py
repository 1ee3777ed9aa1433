"""A profile's folder: made ready, and what is written into it."""

import json
from dataclasses import replace
from pathlib import Path

from adasim.errors import InputError
from adasim.experiment import open_folder, write_manifest
from adasim.files import write_atomic
from adasim.identity import EngineIdentity
from adasim.profiling.campaign import Campaign
from adasim.profiling.points import Profiled, Run, tabulate
from adasim.profiling.summary import lines, pictures


def ready(campaign: Campaign, *, resume: bool, overwrite: bool) -> None:
    """Make the folder ready.

    Raises:
        InputError: it holds something else, or was measured on another engine.
    """
    out, engine = campaign.out, campaign.design.engine.identity()
    before = _engine_of(out / "manifest.json") if resume else None
    kept = open_folder(out, resume=resume, overwrite=overwrite, command="profile")
    if before is not None and (changes := engine.differs(before)):
        raise InputError(f"--out {out}: was measured on another engine ({'; '.join(changes)}); use --overwrite")
    foreign = set(kept) - campaign.keys()
    if foreign:
        raise InputError(f"--out {out}: holds {len(foreign)} runs of another scenario, grid or version; use --overwrite")
    write_manifest(replace(campaign.design.plan, trials=[]), out, finished=False, command="profile")


def _engine_of(manifest: Path) -> EngineIdentity | None:
    try:
        return EngineIdentity.model_validate(json.loads(manifest.read_text())["engine"])
    except (OSError, ValueError, KeyError):  # no folder yet, or one that open_folder refuses
        return None


def write(campaign: Campaign) -> Profiled | None:
    """Tables, figures and manifest of what was measured so far; None: nothing was."""
    made, out = campaign.made(), campaign.out
    finished = not (campaign.interrupted or campaign.failures or too_thin(campaign))
    plan = replace(campaign.design.plan, trials=[campaign.design.trial(*at) for at in made])
    notes = [*campaign.design.notes, *left_out(campaign)]
    write_manifest(plan, out, finished=finished, command="profile", notes=notes)
    if all(v.kind == "reference" for v, _ in made):
        return None
    tables = tabulate(Run(v, r, campaign.folder(v, r)) for v, r in made)
    names = {"profile_points": tables.points, "profile_outliers": tables.outliers, "reference": tables.reference}
    for name, table in names.items():
        write_atomic(out / "tables" / f"{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    for name, picture in pictures(tables).items():
        write_atomic(out / "figures" / f"{name}.png", picture)
    write_atomic(out / "report.md", _page(campaign, tables))
    return tables


def _page(campaign: Campaign, tables: Profiled) -> str:
    """The answer as a page, with the figures."""
    scenario, engine = campaign.design.plan.scenario, campaign.design.engine.identity()
    said = "\n".join(f"- {line}" for line in [*answer(campaign, tables), *too_thin(campaign)])
    place = ", ".join(f"{name} {value}" for name, value in engine.model_dump().items() if value is not None)
    figures = "\n\n".join(f"![{name}](figures/{name}.png)" for name in ("verify", "drift"))
    return (
        f"# Profile: {scenario.title}\n\nMeasured with acceptance forced; milliseconds are medians.\n\n{said}\n\n"
        f"{figures}\n\nEngine: {place}.\n\nEvery point: tables/profile_points.csv.\n"
    )


def answer(campaign: Campaign, tables: Profiled | None, most: int | None = None) -> list[str]:
    """What was found and what was not, in sentences; ``most``: see :func:`left_out`."""
    says = [] if tables is None else lines(tables)
    made = f"{len(campaign.made())} runs, {0 if tables is None else len(tables.points)} points"
    return [made, *says, *campaign.design.notes, *left_out(campaign, most)]


def too_thin(campaign: Campaign) -> list[str]:
    """What keeps a profile from being used: the least it must hold, and about how long that would take."""
    missing = [v for v in campaign.never() if v.tier == 0]
    if not missing or campaign.interrupted:
        return []
    seconds = sum(campaign.estimate_s(v) for v in missing)
    places = "; ".join(v.place for v in missing)
    return [f"the profile is too thin: not measured: {places}; go on with --resume and about {seconds:.0f} s more"]


def left_out(campaign: Campaign, most: int | None = None) -> list[str]:
    """What the budget left out; ``most`` visits by name, null = all."""
    left, never = campaign.left(), campaign.never()
    if not left:
        return []
    repeats = sum(n for _, n in left)
    says = f"Left out by the budget: {repeats} runs, about {campaign.more_s():.0f} s more (--resume goes on)"
    more = len(never) - most if most is not None and len(never) > most + 1 else 0
    places = "; ".join(v.place for v in never[: len(never) - more]) + (f"; and {more} more visits" if more else "")
    return [f"{says}; never measured: {places}" if never else f"{says}; every visit was made at least once"]
