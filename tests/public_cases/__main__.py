"""``python -m tests.public_cases OUT``: write the report over all public cases."""

import sys
from pathlib import Path

from tests.public_cases.page import answer, write

if __name__ == "__main__":
    for line in answer(write(Path(sys.argv[1] if len(sys.argv) > 1 else "reports/public_cases"))):
        print(line)
