"""What a policy or scheduler needs against what an engine provides."""

from adasim.errors import InputError
from adasim.types import EngineCaps


def check_needs(label: str, needs: frozenset[str], caps: EngineCaps) -> None:
    """Refuse to run without something that is needed.

    Raises:
        InputError: what is missing, and what there is.
    """
    missing = sorted(needs - caps.provides)
    if missing:
        raise InputError(
            f"{label} needs {', '.join(missing)}; the engine provides {', '.join(sorted(caps.provides)) or 'nothing'}"
        )
