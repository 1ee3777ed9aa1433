"""Differences of a server's counters over a run: did anybody else use it?"""

from collections import defaultdict

from adasim.importers.prometheus import SAMPLE

CHECKED = {"sglang:generation_tokens_total": "output tokens", "sglang:prompt_tokens_total": "prompt tokens"}


def counters(text: str) -> dict[str, float]:
    """Of Prometheus text, counters summed over label sets."""
    found: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if (sample := SAMPLE.match(line)) is not None and sample[1].endswith("_total"):
            found[sample[1]] += float(sample[3])
    return dict(found)


def others(before: str | None, after: str | None, own: dict[str, int]) -> list[str]:
    """What a report must say where a server's counters grew by more or less than this run made them.

    Args:
        before: ``/metrics`` when the run began; None = the server keeps none.
        after: when it had ended.
        own: this run's, by the names of ``CHECKED``.
    """
    if before is None or after is None:
        return ["the server keeps no metrics (--enable-metrics): traffic of others would not have been noticed"]
    first, last = counters(before), counters(after)
    found = []
    for name, what in CHECKED.items():
        if name in last and (grown := last[name] - first.get(name, 0.0)) != own[name]:
            found.append(f"the server counted {grown:g} {what}, of this run are {own[name]}: others used it too")
    return found
