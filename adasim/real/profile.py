"""Measure what forward passes cost: verification and drafting over batch, tokens a request, and context.

For a model on a device, before there is a drafter to serve with or a scenario: ``gpu_check`` uses it. What the steps of
a serving engine cost, scheduling included, is measured by ``adasim profile`` (``adasim.profiling``).

Seconds of the forward passes themselves, tokens chosen included (so that a GPU is waited for); excludes
policies, bookkeeping and queueing. Configurations take turns within each repeat, so that a machine whose
speed drifts changes all of them alike: compare within one profile only.
"""

import csv
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import torch

from adasim.real.draft import Drafter
from adasim.real.kv import KVCache, Span
from adasim.real.target import Target


@dataclass(frozen=True, slots=True)
class Cost:
    """One measured configuration."""

    what: str  # verify or draft
    batch: int
    tokens: int  # a request, the anchor counted
    context: int  # cached tokens a request
    median_s: float
    best_s: float
    repeats: int


def measure(
    target: Target,
    drafter: Drafter | None,
    batches: Sequence[int],
    tokens: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 9,
    budget_s: float = 240.0,
) -> list[Cost]:
    """Time every combination, up to ``budget_s`` seconds in all.

    Args: tokens: verified a request; drafting is timed for the drafter's full block, once a batch and context.
    """
    block = drafter.shape.block if drafter else 0
    slots, longest = max(batches), max(contexts) + max([*tokens, block])
    kv = target.cache(slots, longest)
    runs: dict[tuple[str, int, int, int], Callable[[], object]] = {}
    for batch, context in product(batches, contexts):
        for count in tokens:
            runs["verify", batch, count, context] = _verify(target, kv, batch, count, context)
        if drafter is not None:
            runs["draft", batch, block, context] = _draft(drafter, batch, block, context, longest)
    times: dict[tuple[str, int, int, int], list[float]] = {key: [] for key in runs}
    for run in runs.values():
        run()  # first calls pay for allocation
    start = perf_counter()
    for _ in range(repeats):
        for key, run in runs.items():
            at = perf_counter()
            run()
            times[key].append(perf_counter() - at)
        if perf_counter() - start > budget_s:
            break
    return [
        Cost(*key, median_s=statistics.median(spent), best_s=min(spent), repeats=len(spent))
        for key, spent in times.items()
    ]


def _verify(target: Target, kv: KVCache, batch: int, count: int, context: int) -> Callable[[], object]:
    ids = torch.randint(0, target.arch.vocab, (batch * count,), generator=torch.Generator().manual_seed(0))
    ids, spans = ids.to(target.device), [Span(slot, context, count) for slot in range(batch)]

    def run() -> object:
        hidden, _ = target.forward(ids, spans, kv)
        return target.logits(hidden).argmax(-1).tolist()

    return run


def _draft(drafter: Drafter, batch: int, block: int, context: int, longest: int) -> Callable[[], object]:
    kv = drafter.cache(batch, longest)
    spans, anchors = [Span(slot, context, block) for slot in range(batch)], [1] * batch

    def run() -> object:
        return drafter.logits(drafter.draft(anchors, spans, kv).hidden_SD).argmax(-1).tolist()

    return run


def provenance(target: Target) -> dict[str, object]:
    """Machine and versions, for the file beside the numbers."""
    cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if cuda else platform.processor() or platform.machine(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arch": asdict(target.arch),
    }


def write_csv(path: Path, costs: Iterable[Cost]) -> None:
    """One row a configuration."""
    rows = [asdict(c) for c in costs]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
