"""Many rounds in one compiled loop; see :class:`adasim.kernels.form.Kernels`. Its reference is the engine."""

import numpy as np
from numba.types import Tuple, boolean, float64, int16, int64

from adasim.kernels.form import (
    ACCEPTED,
    BASE,
    CONTEXT,
    DOMAIN,
    DONE,
    DRAFTS,
    HELD,
    ROUNDS,
    SHARED,
    VERIFIED,
    WANT,
    Int16Array,
)
from adasim.kernels.jit import FLOATS, INTS_OUT, TABLE, kernel, part
from adasim.types import FloatArray, IntArray


@part
def _blocks(tokens: int, block_tokens: int, shift: int) -> int:
    """KV blocks of so many tokens; dividing by shifting takes a tenth of the time."""
    return (tokens + block_tokens - 1) >> shift if shift >= 0 else (tokens + block_tokens - 1) // block_tokens


@part
def _taken(lives: IntArray, ids: IntArray, draft_len: int, block_tokens: int, shift: int) -> int:
    """KV blocks that a round takes."""
    taken = 0
    for i in range(len(ids)):
        life = lives[ids[i]]
        taken += max(_blocks(life[CONTEXT] + draft_len, block_tokens, shift) - life[SHARED] - life[HELD], 0)
    return taken


@part
def _drawn(lives: IntArray, index: int, grades: Int16Array, noise: FloatArray, drafts: bool, by_head: bool) -> bool:
    """Whether a request's luck was drawn, as far as it is needed."""
    base = lives[index, BASE]
    return not ((drafts and grades[base] < 0) or (by_head and np.isnan(noise[base])))


@part
def _round(
    lives: IntArray, ids: IntArray, grades: Int16Array, limits: IntArray, noise: FloatArray,
    draft_len: int, verify_len: int, gamma: float, anchor: int, floor: bool, least: int, bias: float, scale: float,
    block_tokens: int, shift: int, blocks: IntArray, row: IntArray, looks: FloatArray,
) -> int:  # fmt: skip
    """One round, to ``row`` of ``out``. Returns how many have all their tokens now."""
    by_head = verify_len == 0
    reach = limits.shape[1] if by_head else verify_len - 1  # beyond it nobody looks
    taken = context = verified = longest = all_accepted = all_emitted = held = gone = 0
    if by_head:
        for i in range(len(ids)):  # a loop of its own: memory is slow, and here nothing waits for it
            looks[i] = noise[lives[ids[i], BASE] + lives[ids[i], DONE]]
    for i in range(len(ids)):
        life = lives[ids[i]]
        context += life[CONTEXT]
        taken += max(_blocks(life[CONTEXT] + draft_len, block_tokens, shift) - life[SHARED] - life[HELD], 0)
        domain, at = life[DOMAIN], life[BASE] + life[DONE]
        run = 0
        while run < reach and grades[at + 1 + run] <= limits[domain, run]:
            run += 1
        length = verify_len
        if by_head:
            scaled = gamma * (1 + (run + bias + scale * looks[i]) - anchor)
            whole = np.floor(scaled) if floor else np.rint(scaled)
            length = min(int(max(whole + anchor, least)), draft_len + 1)
        accepted = min(run, length - 1)
        emitted = min(accepted + 1, life[WANT] - life[DONE])
        life[DONE] += emitted
        life[CONTEXT] += emitted
        life[ROUNDS] += 1
        life[DRAFTS] += draft_len
        life[VERIFIED] += length
        life[ACCEPTED] += accepted
        blocks[domain, length, accepted] += 1
        needed = _blocks(life[CONTEXT] - 1, block_tokens, shift) - life[SHARED]  # the newest token has no KV yet
        held += needed - life[HELD]
        life[HELD] = needed
        gone += life[DONE] >= life[WANT]
        verified += length
        longest = max(longest, length)
        all_accepted += accepted
        all_emitted += emitted
    row[0], row[1], row[2], row[3], row[4] = verified, longest, context, all_accepted, all_emitted
    row[5], row[6], row[7] = taken, held, len(ids)
    return gone


@part
def _exchange(
    lives: IntArray, ids: IntArray, first: int, entering: int, block: int, block_tokens: int, shift: int, free: int,
    left: IntArray,
) -> tuple[bool, int]:  # fmt: skip
    """Those of ``ids`` who have all their tokens leave, the others move up, and ``entering`` come after them.

    Returns whether they did, and the KV blocks that are held more. They do not where ``free`` may be too few blocks to
    admit them, nor where one was evicted before or wants no more than the token that its prefill gives.
    """
    admitted = taken = 0
    for index in range(first, first + entering):
        life = lives[index]
        if life[DONE] > 0 or life[WANT] < 2:
            return False, 0
        admitted += _blocks(life[CONTEXT] + block, block_tokens, shift)
        taken += _blocks(life[CONTEXT], block_tokens, shift)
    for i in range(len(ids)):
        life = lives[ids[i]]
        if life[DONE] >= life[WANT]:
            admitted -= life[HELD]
            taken -= life[HELD]
    if admitted > free:
        return False, 0
    kept = gone = 0
    for i in range(len(ids)):
        life = lives[ids[i]]
        if life[DONE] < life[WANT]:
            ids[kept] = ids[i]
            kept += 1
        else:
            left[gone, 0] = ids[i]
            gone += 1
    for i in range(entering):
        ids[kept + i] = first + i
        lives[first + i, HELD] = _blocks(lives[first + i, CONTEXT], block_tokens, shift)
    return True, taken


@part
def _prefill(lives: IntArray, ids: IntArray, limit: int, count: int, left: IntArray, out: IntArray) -> int:
    """Steps that compute the prompts of ``ids``, whole and in order, and give first tokens. Returns the new ``count``."""
    last = count - 1
    for i in range(len(ids)):
        life = lives[ids[i]]
        tokens = life[CONTEXT]
        if last < count or out[last, 0] + tokens > limit:
            last += 1
            out[last] = 0
        out[last, 0] += tokens
        out[last, 2] += tokens * tokens
        out[last, 4] += 1
        left[i, 2] = last
        life[DONE] += 1
        life[CONTEXT] += 1
    return last + 1


@kernel(
    Tuple((int64, int64, boolean)), TABLE, INTS_OUT, int16[::1], int64[:, ::1], FLOATS,
    int64, int64, float64, int64, boolean, int64, float64, float64,
    int64, int64, int64, int64, int64, int64, int64, int64[:, :, ::1], int64[:, ::1], int64[:, ::1],
)  # fmt: skip
def rounds(
    lives: IntArray, ids: IntArray, grades: Int16Array, limits: IntArray, noise: FloatArray,
    draft_len: int, verify_len: int, gamma: float, anchor: int, floor: bool, least: int, bias: float, scale: float,
    block_tokens: int, free: int, first: int, spare: int, fewest: int, block: int, prefill_limit: int, blocks: IntArray,
    left: IntArray, out: IntArray,
) -> tuple[int, int, bool]:  # fmt: skip
    drafts, by_head = draft_len > 0, verify_len == 0
    for i in range(len(ids)):
        if not _drawn(lives, ids[i], grades, noise, drafts, by_head):
            return -1, 0, False
    shift = 0
    while 1 << shift < block_tokens:
        shift += 1
    shift = shift if 1 << shift == block_tokens else -1
    most = len(ids) * (draft_len // block_tokens + 1)  # blocks that a round can take
    looks = np.empty(len(ids))
    count = moved = gone = 0
    while count < len(out):
        if free < most and _taken(lives, ids, draft_len, block_tokens, shift) > free:
            break
        gone = _round(
            lives, ids, grades, limits, noise, draft_len, verify_len, gamma, anchor, floor, least, bias, scale,
            block_tokens, shift, blocks, out[count], looks,
        )  # fmt: skip
        free -= out[count, 6]
        count += 1
        if gone == 0:
            continue
        # from here to the next round, which must fit
        entering = gone if moved + gone <= spare else 0
        n, here = len(ids) - gone + entering, left[moved : moved + gone]
        if n < fewest or len(here) < gone or count + entering >= len(out):
            break
        ready = True
        for index in range(first + moved, first + moved + entering):
            ready = ready and _drawn(lives, index, grades, noise, drafts, by_head)
        if not ready:
            break
        done, taken = _exchange(lives, ids, first + moved, entering, block, block_tokens, shift, free - most, here)
        if not done:
            break
        here[:, 1] = count - 1
        out[count - 1, 6] += taken
        free -= taken
        ids = ids[:n]
        count = _prefill(lives, ids[n - entering :], prefill_limit, count, here, out)
        moved += gone
        gone = 0
    return count, moved, gone > 0
