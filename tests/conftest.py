"""Settings for all tests."""

import os
from collections.abc import Callable, Iterator

import pytest

from adasim.kernels import kernels

# several test processes share two cores: spinning OpenMP threads would stand in each other's way
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def using(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Chooses the kernels: numba or numpy."""

    def choose(name: str) -> None:
        monkeypatch.setenv("ADASIM_KERNELS", name)
        kernels.cache_clear()

    yield choose
    kernels.cache_clear()
