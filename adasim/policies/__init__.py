"""Rules that decide how many tokens to draft and verify, and who is admitted."""

from typing import Annotated

from pydantic import Field

from adasim.policies.adaspec import AdaSpec
from adasim.policies.dcut import DCut
from adasim.policies.dspark import DSpark
from adasim.policies.exp3 import Exp3
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.policies.oracle import Oracle
from adasim.policies.probe import Probe
from adasim.policies.rolling_off import RollingOff
from adasim.policies.schedule import Schedule
from adasim.policies.sglang_ema import SGLangEma
from adasim.policies.sglang_throughput import SGLangThroughput
from adasim.policies.smartspec import SmartSpec
from adasim.policies.specdecpp import SpecDecPP
from adasim.policies.tetris import Tetris
from adasim.policies.threshold import Threshold
from adasim.policies.ucb1 import Ucb1
from adasim.policies.vllm_adaptive import VllmAdaptive

AnyPolicy = Annotated[
    Off
    | Fixed
    | Schedule
    | RollingOff
    | SGLangEma
    | SGLangThroughput
    | SmartSpec
    | AdaSpec
    | Ucb1
    | Exp3
    | Head
    | Threshold
    | SpecDecPP
    | Tetris
    | DCut
    | DSpark
    | VllmAdaptive
    | Oracle
    | Probe,
    Field(discriminator="kind"),
]
