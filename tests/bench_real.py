"""Speed of the torch engine, as ratios measured side by side in one run. The last line is one JSON document.

Run with nothing else running: a busy machine changes ratios too. Needs SmolLM2's weights.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from adasim.lengths import FixedLength
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.real.asked import DRAFTERS
from adasim.real.backend import TorchBackend
from adasim.real.kv import Span
from adasim.real.profile import measure
from adasim.real.target import Target
from adasim.real.weights import SMOLLM2, load_target, model_dir
from adasim.workload import Closed

NEW_TOKENS = 64
PROMPT = list(range(1000, 1064))


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratios(one: Callable[[], object], other: Callable[[], object], repeats: int) -> list[float]:
    """Time of ``one`` over time of ``other``, interleaved after a warm-up of each."""
    one(), other()
    return [seconds(one) / seconds(other) for _ in range(repeats)]


def ours(target: Target, batch: int) -> Callable[[], object]:
    """Prefill and greedy decoding of ``NEW_TOKENS`` tokens with our forward."""

    def run() -> None:
        kv = target.cache(batch, len(PROMPT) + NEW_TOKENS)
        spans = [Span(slot, 0, len(PROMPT)) for slot in range(batch)]
        hidden, _ = target.forward(torch.tensor(PROMPT * batch), spans, kv)
        ends = torch.arange(1, batch + 1) * len(PROMPT) - 1
        for step in range(NEW_TOKENS):
            tokens = target.logits(hidden[ends]).argmax(-1)
            if step == NEW_TOKENS - 1:
                break
            hidden, _ = target.forward(tokens, [Span(s, len(PROMPT) + step, 1) for s in range(batch)], kv)
            ends = torch.arange(batch)

    return run


def theirs(model: Any, batch: int) -> Callable[[], object]:
    """The same with transformers' generate."""
    ids = torch.tensor([PROMPT] * batch)

    def run() -> object:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )

    return run


def packed(target: Target, lengths: list[int]) -> Callable[[], object]:
    """One verification of these lengths at context 128."""
    kv = target.cache(len(lengths), 192)
    spans, tokens = [Span(i, 128, n) for i, n in enumerate(lengths)], torch.ones(sum(lengths), dtype=torch.long)
    return lambda: target.logits(target.forward(tokens, spans, kv)[0]).argmax(-1).tolist()


def served(policy: Policy, domain: str) -> tuple[float, float]:
    """Tokens per second after the first token, and the share of round time outside forwards, at concurrency 1."""
    backend = TorchBackend(drafter=SMOLLM2, ignore_eos=True)
    workload = Closed(concurrency=1, requests=3, output_len=FixedLength(tokens=64), domains={domain: 1.0})
    steps = backend.run(workload, policy, 0).steps
    rounds = steps[steps["decoding"] > 0]
    spent = (rounds["end_s"] - rounds["start_s"]).sum()
    return float(rounds["emitted"].sum() / spent), float(rounds["overhead_s"].sum() / spent)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(SMOLLM2)
    model = AutoModelForCausalLM.from_pretrained(model_dir(SMOLLM2), dtype=torch.bfloat16, local_files_only=True)
    found: dict[str, list[float]] = {}
    for batch in (1, 16):
        name = f"plain decoding, tokens/s over transformers generate, batch {batch}"
        found[name] = ratios(theirs(model, batch), ours(target, batch), options.repeats)
    found["verifying 16 tokens over verifying 1, batch 1"] = ratios(
        packed(target, [16]), packed(target, [1]), 10 * options.repeats
    )
    found["packed lengths 1..15 over 8 each, 8 requests"] = ratios(
        packed(target, [1, 15, 3, 13, 5, 11, 7, 9]), packed(target, [8] * 8), 10 * options.repeats
    )
    if (DRAFTERS / SMOLLM2).is_dir():
        backend = TorchBackend(drafter=SMOLLM2)
        _, drafter, _ = backend.load_drafter(target)
        costs = measure(target, drafter, [1], [1], [128], repeats=10 * options.repeats)
        times = {c.what: c.median_s for c in costs}
        found["drafting a block of 16 over a target forward of 1 token, batch 1"] = [times["draft"] / times["verify"]]
        policies: list[Policy] = [Fixed(verify_len=4, draft_len=15), Fixed(verify_len=8, draft_len=15), Head()]
        for domain in ("code", "math", "chat"):
            for policy in policies:
                pairs = [(served(policy, domain), served(Off(), domain)) for _ in range(2)]
                found[f"tokens/s over plain decoding, {policy.label}, {domain}, concurrency 1"] = [
                    a[0] / b[0] for a, b in pairs
                ]
                found[f"share of round time outside forwards, {policy.label}, {domain}"] = [a[1] for a, _ in pairs]
    rows = {k: {"median": median(v), "min": min(v), "max": max(v), "runs": len(v)} for k, v in found.items()}
    for name, row in rows.items():
        print(f"{name:78s} {row['median']:.3f}  ({row['min']:.3f}..{row['max']:.3f})")
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    print(json.dumps({"machine": machine, "threads": options.threads, "ratios": rows}))


if __name__ == "__main__":
    main()
