"""What columns of people's tables are called, and what is meant."""

import re

BRACKETS = re.compile(r"\s*\(.*?\)|_?digiti[sz]ed")
NAMES = {
    "concurrency": ("batch", "batch_size", "bs", "c", "concurrency", "max_concurrency", "num_requests"),
    "k": ("k", "draft_len", "num_speculative_tokens", "num_spec_tokens", "mtp_window", "gamma"),
    "best_k": ("best_k",),
    "steps": ("steps", "num_steps", "speculative_num_steps"),
    "topk": ("topk", "top_k", "eagle_topk", "speculative_eagle_topk"),
    "verify_len": ("verify_len", "num_draft_tokens", "speculative_num_draft_tokens"),
    "output_tok_s": (
        *("output_tok_s", "throughput_tok_s", "tok_s", "throughput", "output_throughput", "agg_tok_s", "tps"),
        *(
            "aggregate_output_tok_s",
            "tok_s_per_rank",
            "tokens_per_s",
            "tokens_per_second",
            "output_tokens_per_s",
            "tok_s_gpu",
        ),
    ),
    "tok_s_user": ("interactivity_tok_s_user", "tok_s_user", "tok_s_per_user"),
    "tau": (
        "accept_length",
        "accept_len",
        "al",
        "tau",
        "acceptance_length",
        "mean_acceptance_length",
        "avg_accept_length",
    ),
    "accepted_per_round": ("accepted_per_round", "accept_length_without_bonus"),
    "acceptance_rate": ("acceptance_rate", "accept_rate", "acceptance_rate_pct", "draft_acceptance_pct"),
    "rounds": ("drafts", "num_drafts", "rounds"),
    "drafted": ("draft_tokens", "num_draft_tokens_total", "drafted"),
    "accepted": ("accepted_tokens", "num_accepted_tokens", "accepted"),
    "requests": ("samples", "requests", "num_requests_done", "completed"),
    "output_tokens": ("output_tokens", "total_output_tokens", "generated_tokens"),
    "context": ("context", "context_len", "mean_context"),
    "duration_s": ("duration_s", "latency_s", "wall_s", "elapsed_s"),
    "policy": ("policy", "method", "mode", "draft", "algorithm"),
    "model": ("model", "target"),
    "dataset": ("dataset", "benchmark", "domain"),
    "ms": ("ms", "cost_ms", "step_ms", "verify_ms", "draft_ms", "step_time_ms"),
}
NAMES |= {
    f"{latency}_{ours}_ms": tuple(f"{theirs}_{latency}_ms" for theirs in names)
    + tuple(f"{latency}_{t}_ms" for t in names)
    for latency in ("ttft", "tpot", "itl", "e2e")
    for ours, names in {"mean": ("mean", "avg"), "p50": ("median", "p50"), "p99": ("p99",)}.items()
}
NAMES["tpot_mean_ms"] += ("tpot_ms", "ms_per_token", "decode_ms_per_token")
KNOWN = {theirs: ours for ours, names in NAMES.items() for theirs in names}
POSITION = re.compile(r"pos(?:ition)?_?(\d+)(?:_pct)?")
BASELINE = re.compile(r"(no[_ -]?spec|none|ar|baseline|vanilla|off|plain|without)", re.IGNORECASE)
NAMED_K = re.compile(r"(?<![a-z])(?:k|mtp)\s*[=_x-]?\s*(\d+)\b", re.IGNORECASE)
SECONDS = re.compile(r"(baseline|vanilla|nospec|no_spec|spec|off|on)_s")
LEADING = re.compile(r"(?!total|input|request|prompt|peak|max|min|std|mean|median|p\d)([a-z0-9]+)_(.+)", re.IGNORECASE)
LED = {"output_tok_s", "tau"}  # measures that a variant's name may stand before


def column_of(name: str) -> str | None:
    """What a column holds, under our name; None: not known. Positions count from 0 in files, from 1 here."""
    plain = BRACKETS.sub("", name).strip().strip("_").lower().replace(" ", "_")
    if found := POSITION.fullmatch(plain):
        return f"position_{int(found[1]) + 1}"
    return KNOWN.get(plain)


def variant_of(name: str) -> tuple[str | None, str]:
    """What a column holds and for which variant: ``AL_eagle3``, ``k7_tok_s``, ``baseline_s``."""
    if column_of(name) is not None:
        return None, ""
    plain = BRACKETS.sub("", name).strip().strip("_")
    if found := SECONDS.fullmatch(plain):
        return "duration_s", found[1]
    if (found := LEADING.fullmatch(plain)) and (known := column_of(found[2])) in LED:
        return known, found[1]
    parts = plain.split("_")
    for cut in range(len(parts) - 1, 0, -1):
        if known := column_of("_".join(parts[:cut])):
            return known, "_".join(parts[cut:])
    return None, ""


def k_of(name: str) -> int | None:
    """The draft length in what something is called: ``fixed_k3``, ``MTP-1``, ``EAGLE3 k=3``."""
    found = NAMED_K.search(name)
    return int(found[1]) if found else None
