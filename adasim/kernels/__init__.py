"""The loops inside a round, over arrays: compiled by numba, and the same again in numpy.

``plain`` is the reference: numpy, one whole array at a time. ``compiled`` is what runs where numba is installed. Both
give the same bits; a test holds them to it. The environment variable ``ADASIM_KERNELS`` chooses ``numpy`` or ``numba``.
"""

import os
from functools import cache
from importlib.util import find_spec

from adasim.errors import InputError
from adasim.kernels.form import Kernels

CHOICES = ("numba", "numpy")


@cache
def kernels() -> Kernels:
    """The kernels in use.

    Raises:
        InputError: ``ADASIM_KERNELS`` is neither of its values, or asks for numba where there is none.
    """
    there = find_spec("numba") is not None
    chosen = os.environ.get("ADASIM_KERNELS") or ("numba" if there else "numpy")
    if chosen not in CHOICES or (chosen == "numba" and not there):
        raise InputError(f"ADASIM_KERNELS={chosen}: allowed: numpy{', numba' if there else ' (numba is not installed)'}")
    if chosen == "numba":
        from adasim.kernels import compiled

        return compiled
    from adasim.kernels import plain

    return plain
