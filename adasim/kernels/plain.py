"""The kernels in numpy: what they mean. Shapes and meanings stand in :class:`adasim.kernels.form.Kernels`."""

import numpy as np

from adasim.kernels.form import (
    ACCEPTED,
    BASE,
    CONTEXT,
    DOMAIN,
    DONE,
    DRAFTS,
    HELD,
    LEFT,
    ROUNDS,
    SHARED,
    VERIFIED,
    WANT,
    Int16Array,
)
from adasim.types import FloatArray, IntArray


def first_outside(lengths: IntArray, lower: int, most: IntArray) -> int:
    outside = (lengths < lower) | (lengths > lower + most)
    return int(outside.argmax()) if outside.any() else -1


def reserve(lives: IntArray, ids: IntArray, draft_lens: IntArray, block_tokens: int, available: int) -> int:
    held, blocks = lives[ids, HELD], -(-(lives[ids, CONTEXT] + draft_lens) // block_tokens)
    wanted = np.maximum(blocks - lives[ids, SHARED], held)
    more = int((wanted - held).sum())
    if more > available:
        return available - more
    lives[ids, HELD] = wanted
    return more


def look_up(lives: IntArray, ids: IntArray, grades: Int16Array, limits: IntArray, at: IntArray, run: IntArray) -> bool:
    at[:] = lives[ids, BASE] + lives[ids, DONE]
    drafts = grades[at[:, None] + np.arange(1, limits.shape[1] + 1)]  # [n, K]
    run[:] = np.cumprod(drafts <= limits[lives[ids, DOMAIN]], axis=1).sum(axis=1)
    return bool((grades[at] >= 0).all())


def signal(at: IntArray, run: IntArray, noise: FloatArray, bias: float, scale: float, signal: FloatArray) -> bool:
    signal[:] = run + bias + scale * noise[at]
    return not np.isnan(signal).any()


def totals(draft_lens: IntArray, verify_lens: IntArray, context_lens: IntArray) -> tuple[int, int, int, int, int, float]:
    return (
        int(draft_lens.sum()),
        int(np.count_nonzero(draft_lens)),
        int(draft_lens.max()),
        int(verify_lens.sum()),
        int(verify_lens.max()),
        float(context_lens.sum() / len(context_lens)),
    )


def land(
    lives: IntArray, ids: IntArray, draft_lens: IntArray, verify_lens: IntArray, run: IntArray, now_s: float,
    block_tokens: int, emitted_s: FloatArray, blocks: IntArray, accepted: IntArray, emitted: IntArray,
    gaps_s: FloatArray,
) -> tuple[int, int, int, bool]:  # fmt: skip
    n = len(ids)
    accepted, emitted = accepted[:n], emitted[:n]
    accepted[:] = np.minimum(run, verify_lens - 1)
    emitted[:] = np.minimum(accepted + 1, lives[ids, WANT] - lives[ids, DONE])
    counters = (DONE, emitted), (CONTEXT, emitted), (ROUNDS, 1), (DRAFTS, draft_lens), (VERIFIED, verify_lens)
    for column, more in (*counters, (ACCEPTED, accepted)):
        lives[ids, column] += more
    np.add.at(blocks, (lives[ids, DOMAIN], verify_lens, accepted), 1)
    gaps_s[:n] = now_s - emitted_s[ids]
    emitted_s[ids] = now_s
    cached = lives[ids, CONTEXT] - 1  # the newest token, the next anchor, has no KV yet
    spare = lives[ids, HELD] - (-(-cached // block_tokens) - lives[ids, SHARED])
    lives[ids, HELD] -= spare
    complete = bool((lives[ids, DONE] >= lives[ids, WANT]).any())
    return int(accepted.sum()), int(emitted.sum()), int(spare.sum()), complete


def rounds(
    lives: IntArray, ids: IntArray, grades: Int16Array, limits: IntArray, noise: FloatArray,
    draft_len: int, verify_len: int, gamma: float, anchor: int, floor: bool, least: int, bias: float, scale: float,
    block_tokens: int, free: int, first: int, spare: int, fewest: int, block: int, prefill_limit: int, blocks: IntArray,
    left: IntArray, out: IntArray,
) -> tuple[int, int, bool]:  # fmt: skip
    return 0, 0, False  # none: the reference is the engine, which then plays them one by one


def prefill(lives: IntArray, ids: IntArray, limit: int, whole: bool, tokens: IntArray) -> tuple[int, int, float]:
    left = lives[ids, LEFT]
    before = np.cumsum(left) - left
    if whole:
        tokens[:] = np.where((before + left <= limit) | (before == 0), left, 0)
    else:
        tokens[:] = np.minimum(left, (limit - before).clip(0))
    count, total = int(np.count_nonzero(tokens)), int(tokens.sum())
    attended = tokens * (lives[ids, CONTEXT] - left + tokens - tokens / 2)
    return count, total, float(attended.sum() / total)


def land_prefill(
    lives: IntArray, ids: IntArray, tokens: IntArray, now_s: float, first_token_s: FloatArray,
    emitted_s: FloatArray, gaps_s: FloatArray,
) -> tuple[int, int, bool]:  # fmt: skip
    lives[ids, LEFT] -= tokens
    ready = ids[lives[ids, LEFT] == 0]
    again = ready[lives[ready, DONE] > 0]
    gaps_s[: len(again)] = now_s - emitted_s[again]
    first_token_s[ready] = np.where(np.isnan(first_token_s[ready]), now_s, first_token_s[ready])
    lives[ready, DONE] += 1
    lives[ready, CONTEXT] += 1
    emitted_s[ready] = now_s
    return len(ready), len(again), bool((lives[ready, DONE] >= lives[ready, WANT]).any())


def distinct(values: FloatArray, found: FloatArray, counts: IntArray) -> int:
    unique, often = np.unique(values, return_counts=True)
    found[: len(unique)], counts[: len(unique)] = unique, often
    return len(unique)


def grade(
    values: FloatArray, counts: IntArray, domains: IntArray, levels: FloatArray, starts: IntArray, grades: Int16Array
) -> None:
    for mine, domain, start in zip(np.split(values, np.cumsum(counts)[:-1]), domains, starts.tolist(), strict=True):
        grades[start : start + len(mine)] = np.searchsorted(levels[domain], mine)


def finished(lives: IntArray, ids: IntArray, sorted_ids: IntArray) -> int:
    gone = (lives[ids, DONE] >= lives[ids, WANT]) & (lives[ids, LEFT] == 0)
    sorted_ids[:] = np.concatenate([ids[~gone], ids[gone]])
    return len(ids) - int(np.count_nonzero(gone))


def carry(ids: IntArray, curves: FloatArray, request_ids: IntArray, carried: FloatArray) -> None:
    order = np.argsort(ids)
    at = order[np.searchsorted(ids, request_ids, sorter=order).clip(max=len(ids) - 1)]
    carried[:] = np.where((ids[at] == request_ids)[:, None], curves[at], curves.mean(axis=0))


def early_budget(requests: int, rising: FloatArray, seconds: FloatArray) -> int:
    likeliest = rising[::-1]
    likeliest = likeliest[: np.count_nonzero(likeliest >= 0)]
    tokens = requests + np.concatenate([[0.0], np.cumsum(likeliest)])
    per_s = tokens / seconds[: len(tokens)]
    falls = per_s[1:] < per_s[:-1]
    return int(falls.argmax()) if falls.any() else len(likeliest)


def spend(survival: FloatArray, budget: int, least: float, lengths: IntArray) -> None:
    lengths[:] = 1 + np.count_nonzero(survival > least, axis=1)
    equals = np.flatnonzero(survival.ravel() == least)[: budget - int(lengths.sum()) + len(lengths)]
    lengths += np.bincount(equals // survival.shape[1], minlength=len(lengths))


def curves(
    domains: IntArray, signal: FloatArray, posterior: FloatArray, first: float, per_token: int, curves: FloatArray
) -> None:
    rows = np.rint((signal - first) * per_token).astype(np.int64)
    curves[:] = posterior[domains, rows.clip(0, posterior.shape[1] - 1)]


def normals(key: int, streams: IntArray, starts: IntArray, counts: IntArray, draws: FloatArray) -> None:
    for stream, start, count in zip(streams.tolist(), starts.tolist(), counts.tolist(), strict=True):
        rng = np.random.Generator(np.random.Philox(key=[key, stream]))
        rng.standard_normal(out=draws[start : start + count])


def autoregression(draws: FloatArray, phi: float, scale: float, before: float) -> FloatArray:
    from scipy.signal import lfilter  # slow to import, not always needed

    values: FloatArray = lfilter([scale], [1, -phi], draws, zi=np.array([phi * before]))[0]
    return values
