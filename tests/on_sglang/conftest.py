"""One SGLang engine for all tests: a start takes one to three minutes. Its environment must be set before any import."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from adasim.real.sglang_plugin import cpu

os.environ.update(cpu.environment())
sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[0])

if TYPE_CHECKING:
    from tests.on_sglang.serving import Served, Server

TEXTS = {
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "math": "What is 17 * 23? Show your steps.",
    "chat": "Name three things to see in Paris.",
}
TOKENS = 24


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Chat prompts as tokens."""
    from adasim.real.weights import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        for text in TEXTS.values()
    ]


@pytest.fixture(scope="session")
def server() -> Iterator["Server"]:
    """The engine under ADAFLASH."""
    from tests.on_sglang.serving import Server

    server = Server()
    yield server
    gc.collect()  # shared memory goes before its keeper, a child of this process, is killed with the others
    server.engine.shutdown()


@pytest.fixture(scope="session")
def plain(server: "Server", prompts: list[list[int]]) -> "Served":
    """Plain decoding: the same engine, nothing drafted."""
    from adasim.policies.off import Off

    return server.serve(Off(), prompts, TOKENS)
