"""Resolves servers' arguments as a launch does, without loading a model. Prints what each case said, as JSON.

Args: {case: {"policy": text, "arguments": {...}, "fits": versions, "simulate": text}}.
"""

import json
import os
import sys
from functools import partial
from typing import Any
from unittest.mock import patch

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from adasim.real.sglang_plugin import contract


def said(policy: str, arguments: dict[str, Any], fits: tuple[str, ...], simulate: str) -> str:
    """What a launch would end with, or the block that was resolved."""
    os.environ["ADASIM_POLICY"], os.environ["SGLANG_SIMULATE_ACC_LEN"] = policy, simulate
    args = ServerArgs(**arguments)
    try:
        with patch.object(contract, "check", partial(contract.check, supported=fits)):
            args.resolve_once()
    except Exception as error:  # whatever it is, a launch would show it
        return f"{type(error).__name__}: {error}"
    return f"block {args.resolved_dict()['speculative_num_draft_tokens']}"


if __name__ == "__main__":
    load_plugins()
    cases = json.loads(sys.argv[1])
    print(json.dumps({name: said(**case | {"fits": tuple(case["fits"])}) for name, case in cases.items()}))
