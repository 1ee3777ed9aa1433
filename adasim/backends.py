"""Who can run a scenario. Importing this loads no torch."""

from adasim.simulator.backend import SimBackend

AnyBackend = SimBackend
