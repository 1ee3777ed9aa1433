"""numba's decorators, typed. The machine code is kept between runs. No fast math: the bits are numpy's."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numba.types import Array, float64, int64

Function = TypeVar("Function", bound=Callable[..., object])

# Inputs are taken read-only so that one compilation serves constants and fresh arrays.
INTS, FLOATS = Array(int64, 1, "C", readonly=True), Array(float64, 1, "C", readonly=True)
INTS_OUT, FLOATS_OUT = int64[::1], float64[::1]
TABLE = int64[:, ::1]


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's, for machine code alone: before it loads some, numba's own makes the compiler ready, twice the time of it.

    Kernels may call nothing but numba's runtime (memory), libm and each other: what else numba's library offers would not
    be found.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


def kernel(result: Any, *arguments: Any) -> Callable[[Function], Function]:
    """Compiled for these types when its module is imported, or loaded if that was done before."""

    def compiled(function: Function) -> Function:
        dispatcher = njit(function)
        with suppress(RuntimeError):  # neither the package's folder nor the user's cache can be written
            dispatcher._cache = _Cache(function)
        dispatcher.compile(result(*arguments))
        dispatcher.disable_compile()
        return dispatcher

    return compiled


def part(function: Function) -> Function:
    """Compiled only as a part of kernels of its own file; the cache does not see changes in another."""
    return njit(function)
