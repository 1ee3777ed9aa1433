"""The kernels as loops, compiled by numba; see :class:`adasim.kernels.form.Kernels`."""

import numpy as np
from numba.types import Array, Tuple, boolean, float64, int16, int64, none

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
from adasim.kernels.jit import FLOATS, FLOATS_OUT, INTS, INTS_OUT, TABLE, kernel
from adasim.kernels.normals import normals as normals  # noqa: PLC0414 - as much a part of this module as the rest
from adasim.kernels.rounds import rounds as rounds  # noqa: PLC0414 - this too
from adasim.types import FloatArray, IntArray

FLOATS_2D = Array(float64, 2, "C", readonly=True)


@kernel(int64, INTS, int64, INTS)
def first_outside(lengths: IntArray, lower: int, most: IntArray) -> int:
    for i in range(len(lengths)):
        if lengths[i] < lower or lengths[i] > lower + most[i]:
            return i
    return -1


@kernel(int64, TABLE, INTS, INTS, int64, int64)
def reserve(lives: IntArray, ids: IntArray, draft_lens: IntArray, block_tokens: int, available: int) -> int:
    more = 0
    for i in range(len(ids)):
        life = lives[ids[i]]
        blocks = -(-(life[CONTEXT] + draft_lens[i]) // block_tokens)
        more += max(blocks - life[SHARED] - life[HELD], 0)
    if more > available:
        return available - more
    if more > 0:
        for i in range(len(ids)):
            life = lives[ids[i]]
            blocks = -(-(life[CONTEXT] + draft_lens[i]) // block_tokens)
            life[HELD] = max(blocks - life[SHARED], life[HELD])
    return more


@kernel(boolean, TABLE, INTS, int16[::1], int64[:, ::1], INTS_OUT, INTS_OUT)
def look_up(lives: IntArray, ids: IntArray, grades: Int16Array, limits: IntArray, at: IntArray, run: IntArray) -> bool:
    drawn = True
    for i in range(len(ids)):
        life = lives[ids[i]]
        anchor, domain = life[BASE] + life[DONE], life[DOMAIN]
        accepted = 0
        while accepted < limits.shape[1] and grades[anchor + 1 + accepted] <= limits[domain, accepted]:
            accepted += 1
        at[i], run[i] = anchor, accepted
        drawn = drawn and grades[anchor] >= 0
    return drawn


@kernel(boolean, INTS, INTS, FLOATS, float64, float64, FLOATS_OUT)
def signal(at: IntArray, run: IntArray, noise: FloatArray, bias: float, scale: float, signal: FloatArray) -> bool:
    drawn = True
    for i in range(len(at)):
        signal[i] = run[i] + bias + scale * noise[at[i]]
        drawn = drawn and not np.isnan(signal[i])
    return drawn


@kernel(Tuple((int64, int64, int64, int64, int64, float64)), INTS, INTS, INTS)
def totals(draft_lens: IntArray, verify_lens: IntArray, context_lens: IntArray) -> tuple[int, int, int, int, int, float]:
    drafts = drafting = longest_draft = verified = longest = context = 0
    for i in range(len(draft_lens)):
        drafts += draft_lens[i]
        drafting += draft_lens[i] > 0
        longest_draft = max(longest_draft, draft_lens[i])
        verified += verify_lens[i]
        longest = max(longest, verify_lens[i])
        context += context_lens[i]
    return drafts, drafting, longest_draft, verified, longest, context / len(draft_lens)


@kernel(
    Tuple((int64, int64, int64, boolean)), TABLE, INTS, INTS, INTS, INTS, float64, int64,
    FLOATS_OUT, int64[:, :, ::1], INTS_OUT, INTS_OUT, FLOATS_OUT,
)  # fmt: skip
def land(
    lives: IntArray, ids: IntArray, draft_lens: IntArray, verify_lens: IntArray, run: IntArray, now_s: float,
    block_tokens: int, emitted_s: FloatArray, blocks: IntArray, accepted: IntArray, emitted: IntArray,
    gaps_s: FloatArray,
) -> tuple[int, int, int, bool]:  # fmt: skip
    all_accepted = all_emitted = spare = 0
    complete = False
    for i in range(len(ids)):
        life = lives[ids[i]]
        accepted[i] = min(run[i], verify_lens[i] - 1)
        emitted[i] = min(accepted[i] + 1, life[WANT] - life[DONE])
        all_accepted += accepted[i]
        all_emitted += emitted[i]
        life[DONE] += emitted[i]
        life[CONTEXT] += emitted[i]
        life[ROUNDS] += 1
        life[DRAFTS] += draft_lens[i]
        life[VERIFIED] += verify_lens[i]
        life[ACCEPTED] += accepted[i]
        blocks[life[DOMAIN], verify_lens[i], accepted[i]] += 1
        gaps_s[i] = now_s - emitted_s[ids[i]]
        emitted_s[ids[i]] = now_s
        cached = life[CONTEXT] - 1  # the newest token, the next anchor, has no KV yet
        needed = -(-cached // block_tokens) - life[SHARED]
        spare += life[HELD] - needed
        life[HELD] = needed
        complete = complete or life[DONE] >= life[WANT]
    return all_accepted, all_emitted, spare, complete


@kernel(Tuple((int64, int64, float64)), TABLE, INTS, int64, boolean, INTS_OUT)
def prefill(lives: IntArray, ids: IntArray, limit: int, whole: bool, tokens: IntArray) -> tuple[int, int, float]:
    total, attended = 0, 0.0
    for i in range(len(ids)):
        left = lives[ids[i], LEFT]
        take = left if whole and (total + left <= limit or i == 0) else 0 if whole else min(left, limit - total)
        if take <= 0:
            return i, total, attended / total
        tokens[i] = take
        total += take
        attended += take * (lives[ids[i], CONTEXT] - left + take - take / 2)
    return len(ids), total, attended / total


@kernel(Tuple((int64, int64, boolean)), TABLE, INTS, INTS, float64, FLOATS_OUT, FLOATS_OUT, FLOATS_OUT)
def land_prefill(
    lives: IntArray, ids: IntArray, tokens: IntArray, now_s: float, first_token_s: FloatArray,
    emitted_s: FloatArray, gaps_s: FloatArray,
) -> tuple[int, int, bool]:  # fmt: skip
    ready = again = 0
    complete = False
    for i in range(len(ids)):
        life = lives[ids[i]]
        life[LEFT] -= tokens[i]
        if life[LEFT]:
            continue
        ready += 1
        if life[DONE]:
            gaps_s[again] = now_s - emitted_s[ids[i]]
            again += 1
        if np.isnan(first_token_s[ids[i]]):
            first_token_s[ids[i]] = now_s
        life[DONE] += 1
        life[CONTEXT] += 1
        emitted_s[ids[i]] = now_s
        complete = complete or life[DONE] >= life[WANT]
    return ready, again, complete


@kernel(int64, FLOATS, FLOATS_OUT, INTS_OUT)
def distinct(values: FloatArray, found: FloatArray, counts: IntArray) -> int:
    known = 0
    for value in values:  # nearly always few are different: insertion beats sorting
        place = known
        while place > 0 and found[place - 1] > value:
            place -= 1
        if place > 0 and found[place - 1] == value:
            counts[place - 1] += 1
            continue
        for later in range(known, place, -1):
            found[later], counts[later] = found[later - 1], counts[later - 1]
        found[place], counts[place] = value, 1
        known += 1
    return known


@kernel(none, FLOATS, INTS, INTS, FLOATS_2D, INTS, int16[::1])
def grade(
    values: FloatArray, counts: IntArray, domains: IntArray, levels: FloatArray, starts: IntArray, grades: Int16Array
) -> None:
    first = 0
    for r in range(len(counts)):
        mine, here = values[first : first + counts[r]], grades[starts[r] : starts[r] + counts[r]]
        first += counts[r]
        here[:] = 0
        for level in levels[domains[r]]:
            if level == np.inf:
                break
            for i in range(len(mine)):
                here[i] += mine[i] > level


@kernel(int64, TABLE, INTS, INTS_OUT)
def finished(lives: IntArray, ids: IntArray, sorted_ids: IntArray) -> int:
    stay = 0
    for i in range(len(ids)):
        life = lives[ids[i]]
        stay += life[DONE] < life[WANT] or life[LEFT] > 0
    kept, gone = 0, stay
    for i in range(len(ids)):
        life = lives[ids[i]]
        if life[DONE] < life[WANT] or life[LEFT] > 0:
            sorted_ids[kept] = ids[i]
            kept += 1
        else:
            sorted_ids[gone] = ids[i]
            gone += 1
    return stay


@kernel(none, INTS, FLOATS_2D, INTS, float64[:, ::1])
def carry(ids: IntArray, curves: FloatArray, request_ids: IntArray, carried: FloatArray) -> None:
    mean = np.empty(0)
    at = 0
    for i in range(len(request_ids)):
        looked = 0
        while looked < len(ids) and ids[at] != request_ids[i]:  # both in order of admission: mostly the next
            at = at + 1 if at + 1 < len(ids) else 0
            looked += 1
        if looked < len(ids):
            carried[i] = curves[at]
            continue
        if not len(mean):
            mean = np.zeros(curves.shape[1])
            for j in range(len(ids)):
                mean += curves[j]
            mean /= len(ids)
        carried[i] = mean


@kernel(int64, int64, FLOATS, FLOATS)
def early_budget(requests: int, rising: FloatArray, seconds: FloatArray) -> int:
    budget, tokens, per_s = 0, 0.0, requests / seconds[0]
    for i in range(len(rising) - 1, -1, -1):
        if rising[i] < 0:
            break
        tokens += rising[i]
        before, per_s = per_s, (tokens + requests) / seconds[budget + 1]
        if per_s < before:
            break
        budget += 1
    return budget


@kernel(none, FLOATS_2D, int64, float64, INTS_OUT)
def spend(survival: FloatArray, budget: int, least: float, lengths: IntArray) -> None:
    for i in range(len(survival)):
        above = 0
        for s in survival[i]:
            above += s > least
        lengths[i] = 1 + above
        budget -= above
    for i in range(len(survival)):
        if budget <= 0:
            return
        equal = 0
        for s in survival[i]:
            equal += s == least
        lengths[i] += min(equal, budget)
        budget -= equal


@kernel(none, INTS, FLOATS, float64[:, :, ::1], float64, int64, float64[:, ::1])
def curves(
    domains: IntArray, signal: FloatArray, posterior: FloatArray, first: float, per_token: int, curves: FloatArray
) -> None:
    for i in range(len(domains)):
        bin_ = min(max(int64(np.rint((signal[i] - first) * per_token)), 0), posterior.shape[1] - 1)
        for k in range(posterior.shape[2]):
            curves[i, k] = posterior[domains[i], bin_, k]


@kernel(FLOATS_OUT, FLOATS, float64, float64, float64)
def autoregression(draws: FloatArray, phi: float, scale: float, before: float) -> FloatArray:
    values = np.empty(len(draws))
    x = before
    for i in range(len(draws)):
        x = scale * draws[i] + phi * x
        values[i] = x
    return values
