"""SGLang as it comes, plain or with DFLASH, answers prompts in a process of its own. Prints the tokens as JSON.

Args: prompts, number of tokens, arguments, all as JSON.
"""

import json
import sys

import sglang


def main() -> None:
    """Start, answer, print, stop."""
    prompts, tokens, arguments = (json.loads(text) for text in sys.argv[1:])
    engine = sglang.Engine(**arguments)
    shape = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    out = engine.generate(input_ids=prompts, sampling_params=shape)
    engine.shutdown()
    print(json.dumps([o["output_ids"] for o in out]))


if __name__ == "__main__":
    main()
