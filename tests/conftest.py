"""Settings for all tests."""

import os

# several test processes share two cores: spinning OpenMP threads would stand in each other's way
os.environ.setdefault("OMP_NUM_THREADS", "1")
