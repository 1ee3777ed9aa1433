"""The two ways in which adasim refuses to go on. Imports nothing, so that --help stays light."""


class InputError(ValueError):
    """The user's input cannot be used. Holds every problem found, each with its place."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, ...]]:
        return type(self), self.problems


class PolicyError(Exception):
    """A policy or scheduler answered something illegal: a bug in it, not in the input."""
