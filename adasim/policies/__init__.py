"""Rules that decide how many tokens to draft and verify, and who is admitted."""

from typing import Annotated

from pydantic import Field

from adasim.policies.dcut import DCut
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.policies.oracle import Oracle
from adasim.policies.threshold import Threshold

AnyPolicy = Annotated[Off | Fixed | Head | Threshold | DCut | Oracle, Field(discriminator="kind")]
