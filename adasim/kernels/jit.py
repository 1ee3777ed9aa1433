"""numba's decorators, typed. The machine code is kept between runs. No fast math: the bits are numpy's."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit
from numba.types import Array, float64, int64

Function = TypeVar("Function", bound=Callable[..., object])

# Inputs are taken read-only so that one compilation serves constants and fresh arrays.
INTS, FLOATS = Array(int64, 1, "C", readonly=True), Array(float64, 1, "C", readonly=True)
INTS_OUT, FLOATS_OUT = int64[::1], float64[::1]


def kernel(result: Any, *arguments: Any) -> Callable[[Function], Function]:
    """Compiled for these types when its module is imported, or loaded if that was done before."""

    def compiled(function: Function) -> Function:
        try:
            return njit(result(*arguments), cache=True)(function)
        except RuntimeError:  # neither the package's folder nor the user's cache can be written
            return njit(result(*arguments))(function)

    return compiled


def part(function: Function) -> Function:
    """Compiled only as a part of kernels of its own file; the cache does not see changes in another."""
    return njit(function)
