"""Accept or reject drafts so that the output keeps the target's distribution exactly.

Rows are packed: request after request, ``verify_len`` rows each; row j of a request is the target's
distribution for the token after its j-th verified token (the anchor is token 0).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """What verification gives one request: accepted drafts, and the target's own token after them."""

    accepted: int
    token: int


def accept_greedy(best: list[int], drafts: list[list[int]]) -> list[Verdict]:
    """Accept while a draft equals the target's best token.

    Args: best token of each packed row [S]; the drafts verified of each request (verify_len - 1 of them).
    """
    verdicts, at = [], 0
    for tokens in drafts:
        rows = best[at : at + len(tokens) + 1]
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == rows[accepted]:
            accepted += 1
        verdicts.append(Verdict(accepted, rows[accepted]))
        at += len(rows)
    return verdicts


def accept_sampled(
    p: Tensor, q: list[Tensor], drafts: list[list[int]], generator: torch.Generator, vocab: Tensor | None = None
) -> list[Verdict]:
    """Accept draft x with probability min(1, p(x) / q(x)); after a rejection draw from max(0, p - q), else from p.

    Args:
        p: target distributions [S, V], packed.
        q: of each request the drafter's distributions [verify_len - 1, V'] that its drafts were drawn from.
        drafts: the drafts verified of each request.
        vocab: token ids of q's columns; None = q covers the whole vocabulary.
    """
    verdicts, at = [], 0
    for tokens, q_rows in zip(drafts, q, strict=True):
        rows = p[at : at + len(tokens) + 1]
        at += len(rows)
        accepted, last = _accepted_run(rows, q_rows, tokens, generator, vocab), rows[-1]
        if accepted < len(tokens):
            last = rows[accepted] - _spread(q_rows[accepted], rows.shape[-1], vocab)
            last = last.clamp_min(0.0)
            if not last.any():  # p and q differ by rounding only
                last = rows[accepted]
        verdicts.append(Verdict(accepted, int(torch.multinomial(last, 1, generator=generator))))
    return verdicts


def _accepted_run(p: Tensor, q: Tensor, tokens: list[int], generator: torch.Generator, vocab: Tensor | None) -> int:
    if not tokens:
        return 0
    ids = torch.tensor(tokens, device=p.device)
    columns = ids if vocab is None else torch.searchsorted(vocab, ids)
    here = torch.arange(len(tokens), device=p.device)
    ratio = p[here, ids] / q[here, columns]
    luck = torch.rand(len(tokens), generator=generator, device=p.device)
    return int((luck < ratio).long().cumprod(0).sum())


def _spread(q: Tensor, size: int, vocab: Tensor | None) -> Tensor:
    """q [V'] over the whole vocabulary [V], zero where nothing is drafted."""
    return q if vocab is None else torch.zeros(size, dtype=q.dtype, device=q.device).scatter_(0, vocab, q)
