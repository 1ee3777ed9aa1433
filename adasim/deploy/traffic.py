"""The traffic of a canary: blocks of requests, each for both servers."""

import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from adasim.deploy.client import Ask
from adasim.errors import InputError
from adasim.real.texts import read_lines, read_prompts
from adasim.scenario import Scenario
from adasim.workload import Closed


def of_scenario(scenario: Scenario, prompts: str | None, blocks: int, size: int) -> list[list[Ask]]:
    """A workload's output lengths and arrivals, with prompts of its domains; each block starts at time 0.

    Args:
        scenario: whose workload it is.
        prompts: folder of ``DOMAIN*.jsonl``; None = the packaged ones.
        blocks: how many.
        size: requests of one.

    Raises:
        InputError: a domain has no prompts, or the workload too few requests.
    """
    workload, seed = scenario.workload, scenario.seeds[0]
    if isinstance(workload, Closed):  # clients go on; how many requests a simulated run has says nothing here
        workload = workload.model_copy(update={"requests": blocks * size, "requests_per_client": None})
    requests = workload.requests_of(seed)
    if len(requests) < blocks * size:
        raise InputError(f"workload: {len(requests)} requests; {blocks} blocks of {size} need {blocks * size}")
    texts = read_prompts(prompts)
    names = workload.domain_names
    everything = [p for found in texts.values() for p in found]
    lists = {n: list(texts.get(n, everything if n == "default" else [])) for n in names}
    if missing := [n for n, found in lists.items() if not found]:
        raise InputError(
            f"workload.domains: no prompts for {', '.join(missing)}; there are {', '.join(texts)} (--prompts)"
        )
    endless = {n: cycle(_shuffled(found, f"{seed}/{n}")) for n, found in lists.items()}
    asks = [Ask(next(endless[names[r.domain]]), r.output_len, r.arrival_s) for r in requests[: blocks * size]]
    return [_from_zero(asks[i : i + size]) for i in range(0, blocks * size, size)]


def of_file(path: Path, tokens: int, blocks: int, size: int) -> list[list[Ask]]:
    """Prompts of a file, one JSON object with a ``prompt`` a line, or of a folder of them; in an order of their own.

    Raises:
        InputError: unreadable, or a line without a prompt.
    """
    if not path.exists():
        raise InputError(f"--prompts {path}: is not there")
    found = [p for texts in read_prompts(str(path)).values() for p in texts] if path.is_dir() else read_lines(path)
    if not found:
        raise InputError(f"--prompts {path}: holds no prompt")
    endless = cycle(_shuffled(found, "canary"))
    return [[Ask(next(endless), tokens) for _ in range(size)] for _ in range(blocks)]


def _shuffled(texts: Sequence[str], key: str) -> list[str]:
    mixed = list(texts)
    random.Random(key).shuffle(mixed)
    return mixed


def _from_zero(asks: Sequence[Ask]) -> list[Ask]:
    return [ask._replace(at_s=ask.at_s - asks[0].at_s) for ask in asks]
