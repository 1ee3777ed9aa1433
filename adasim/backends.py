"""Who can run a scenario. Importing this loads neither torch nor SGLang."""

from typing import Annotated

from pydantic import Field

from adasim.real.backend import TorchBackend
from adasim.real.sglang_client.backend import SglangBackend
from adasim.simulator.backend import SimBackend

AnyBackend = Annotated[SimBackend | TorchBackend | SglangBackend, Field(discriminator="kind")]
