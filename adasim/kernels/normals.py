"""numpy's standard normal numbers from Philox streams, compiled: the same bits in a third of the time.

numpy starts a stream by taking a state over, and calls a function for every word and every number.
"""

from collections.abc import Callable
from math import exp, log1p
from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numba.np.random._constants import fi_double, ki_double, wi_double, ziggurat_nor_inv_r, ziggurat_nor_r
from numba.types import float64, int64, none, uint64
from numpy.typing import NDArray

from adasim.kernels.jit import FLOATS_OUT, INTS, kernel, part
from adasim.types import FloatArray, IntArray

Words = NDArray[np.uint64]
M0, M1, W0, W1 = (np.uint64(x) for x in (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B))


@intrinsic  # type: ignore[untyped-decorator]
def _high(_: Any, a: Any, b: Any) -> tuple[Any, Callable[..., Any]]:
    """The upper 64 bits of a product."""

    def product(context: Any, builder: Any, signature: Any, factors: Any) -> Any:
        wide = ir.IntType(128)
        whole = builder.mul(*(builder.zext(f, wide) for f in factors))
        return builder.trunc(builder.lshr(whole, ir.Constant(wide, 64)), ir.IntType(64))

    return uint64(a, b), product


@part
def _philox(key: np.uint64, stream: np.uint64, words: Words) -> None:
    """The first words of a stream of Philox4x64-10 (Salmon et al. 2011), a multiple of 8.

    Two blocks at a time: the steps of one fill the waiting times of the other.
    """
    for i in range(0, len(words), 8):
        a0, a1, a2, a3 = uint64(i // 4 + 1), uint64(0), uint64(0), uint64(0)
        b0, b1, b2, b3 = uint64(i // 4 + 2), uint64(0), uint64(0), uint64(0)
        k0, k1 = uint64(key), uint64(stream)
        for _ in range(10):
            a0, a1, a2, a3 = _high(M1, a2) ^ a1 ^ k0, M1 * a2, _high(M0, a0) ^ a3 ^ k1, M0 * a0
            b0, b1, b2, b3 = _high(M1, b2) ^ b1 ^ k0, M1 * b2, _high(M0, b0) ^ b3 ^ k1, M0 * b0
            k0, k1 = k0 + W0, k1 + W1
        words[i], words[i + 1], words[i + 2], words[i + 3] = a0, a1, a2, a3
        words[i + 4], words[i + 5], words[i + 6], words[i + 7] = b0, b1, b2, b3


@part
def _uniform(word: np.uint64) -> float:
    return float64(int64(word >> uint64(11))) * (1.0 / 9007199254740992.0)


@part
def _ziggurat(words: Words, draws: FloatArray) -> bool:
    """numpy's normal numbers (Doornik 2005) from its words; False: there are too few.

    8 bits of a word choose the layer, one the sign, 52 the place in it; one number in 80 falls outside and needs more.
    """
    used = 0
    for i in range(len(draws)):
        while True:
            if used + 3 > len(words):
                return False
            word = words[used]
            used += 1
            layer, within = int64(word & uint64(0xFF)), int64((word >> uint64(9)) & uint64((1 << 52) - 1))
            sign = 1.0 - 2.0 * float64(int64((word >> uint64(8)) & uint64(1)))  # no branch to be guessed
            x = sign * (within * wi_double[layer])
            if uint64(within) < ki_double[layer]:
                break
            if layer > 0:
                used += 1
                share = _uniform(words[used - 1])
                if (fi_double[layer - 1] - fi_double[layer]) * share + fi_double[layer] < exp(-0.5 * x * x):
                    break
                continue
            far, near = 1.0, 0.0
            while near + near <= far * far:
                if used + 2 > len(words):
                    return False
                far = -ziggurat_nor_inv_r * log1p(-_uniform(words[used]))
                near = -log1p(-_uniform(words[used + 1]))
                used += 2
            x = -(ziggurat_nor_r + far) if (within >> 8) & 1 else ziggurat_nor_r + far
            break
        draws[i] = x
    return True


@kernel(none, uint64, INTS, INTS, INTS, FLOATS_OUT)
def normals(key: int, streams: IntArray, starts: IntArray, counts: IntArray, draws: FloatArray) -> None:
    for i in range(len(streams)):
        mine, count = draws[starts[i] : starts[i] + counts[i]], counts[i] + counts[i] // 16 + 64  # 1.022 a number
        words = np.empty(count // 8 * 8, dtype=np.uint64)
        _philox(uint64(key), uint64(streams[i]), words)
        while not _ziggurat(words, mine):
            words = np.empty(2 * len(words), dtype=np.uint64)
            _philox(uint64(key), uint64(streams[i]), words)
