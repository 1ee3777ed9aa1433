"""Who can run a scenario. Importing this loads no torch."""

from typing import Annotated

from pydantic import Field

from adasim.real.backend import TorchBackend
from adasim.simulator.backend import SimBackend

AnyBackend = Annotated[SimBackend | TorchBackend, Field(discriminator="kind")]
