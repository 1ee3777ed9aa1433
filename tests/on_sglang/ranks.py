"""SGLang under ADAFLASH on several ranks, in a process of its own. Prints tokens and rounds by policy as JSON.

Args: ranks, prompts, number of tokens, policies, the last three as JSON.
"""

import json
import sys

from pydantic import TypeAdapter

from adasim.policies import AnyPolicy
from adasim.policies.base import Policy
from tests.on_sglang.serving import Server


def main() -> None:
    """Start, answer by each policy, print, stop."""
    ranks, prompts, tokens, policies = (json.loads(text) for text in sys.argv[1:])
    server, found = Server(tp_size=ranks), {}
    for raw in policies:
        policy: Policy = TypeAdapter(AnyPolicy).validate_python(raw)
        served = server.serve(policy, prompts, tokens)
        found[policy.kind] = {"tokens": served.tokens, "rounds": [served.of(i) for i in range(len(prompts))]}
    server.engine.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
