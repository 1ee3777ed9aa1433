"""The model card of a shipped drafter, written from measured facts and the training log."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CARD = """# A DFlash drafter for {target}

{layers} draft layers, block {block}, reads target layers {taps}; drafts {vocab} of the target's tokens (q = 0 for
the others: still lossless). Public DFlash layout, with a length head ({form} form) and `draft_vocab.npy` beside it.
Weights SHA-256 `{sha256}`.

| held-out prompts (rows 150-199) | tau | rounds | P(first 1 / 2 / 3 / 4 accepted) |
|---|---|---|---|
{rows}

tau counts the bonus token; greedy bf16 text of at most 256 tokens, full blocks, walked as speculation would.

**Length head**: root mean squared error {rmse:.2f} tokens on held-out blocks, where L + 1 has a standard deviation
of {std:.2f}; mean predicted {predicted:.2f}, true {true:.2f}.

**Training**: {steps} steps, {positions:,} positions, {hours:.1f} h of one busy CPU thread; {lessons:,} texts with
{tokens:,} answer tokens, generated greedily by the target from varied rows 0-149, templates and prompts that the
target made up. Half soft labels (top 8), half hard; weights exp(-(i - 1) / 4); most steps train 5 positions,
15 % the whole block; averaged weights are shipped.

| step | loss | {domains} |
|---|---|---{dashes}|
{curve}

Limits: {limits}
"""


def card(facts: dict[str, Any], log: Sequence[dict[str, Any]], limits: str) -> str:
    """Markdown from ``pipeline.ship``'s facts and the trainer's log entries."""
    held, head = facts["held_out"], facts["head"]
    rows = [
        f"| {d} | {t['tau']:.2f} | {t['rounds']:,} | {' / '.join(f'{s:.2f}' for s in t['survival'])} |"
        for d, t in held.items()
    ]
    curve = [
        f"| {e['step']} | {e['loss']:.2f} | {' | '.join(format(e['held_out'][d]['tau'], '.2f') for d in held)} |"
        for e in log
    ]
    return CARD.format(
        **{k: facts[k] for k in ("target", "layers", "block", "taps", "vocab", "positions", "lessons", "sha256")},
        form=head["form"],
        rows="\n".join(rows),
        rmse=head["held_out_rmse_tokens"],
        std=head["held_out_std_tokens"],
        predicted=head["held_out_mean_predicted"],
        true=head["held_out_mean_true"],
        steps=facts["step"],
        hours=facts["train_s"] / 3600,
        tokens=facts["answer_tokens"],
        domains=" | ".join(f"tau {d}" for d in held),
        dashes="|---" * (len(held) - 1),
        curve="\n".join(curve),
        limits=limits,
    )


def read_log(path: Path) -> list[dict[str, Any]]:
    """Entries of a training log."""
    return [json.loads(line) for line in path.read_text().splitlines()]
