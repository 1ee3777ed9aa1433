"""Training prompts without end: given rows varied, templates filled, and prompts the target makes up itself.

Prompt ``i`` depends on ``i`` and the rows only, so that a generator can stop and resume anywhere.
"""

import inspect
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Literal, NamedTuple

from adasim.real import prompt_parts as parts

Domain = Literal["chat", "code", "math"]
DOMAINS: tuple[Domain, ...] = ("chat", "code", "math")
SOURCES = ("rows", "templates", "proposed")


class Prompt(NamedTuple):
    """One user turn.

    Where the source is ``proposed`` the text is only its beginning: the target goes on, sampled, before it answers.
    """

    domain: Domain
    source: str
    text: str


def prompt(index: int, rows: Mapping[str, Sequence[str]]) -> Prompt:
    """Training prompt ``index``: half chat, a quarter each code and math; sources 30 / 35 / 35 %.

    Args: rows: given prompts by domain; a domain without rows uses templates instead.
    """
    rng = random.Random(index)
    domain: Domain = rng.choices(DOMAINS, (0.5, 0.25, 0.25))[0]
    source = rng.choices(SOURCES, (0.30, 0.35, 0.35))[0]
    if source == "rows" and rows.get(domain):
        return Prompt(domain, source, _vary(rng.choice(rows[domain]), domain, rng))
    if source == "proposed":
        return Prompt(domain, source, rng.choice(parts.STARTS[domain]))
    return Prompt(domain, "templates", {"chat": _chat, "code": _code, "math": _math}[domain](rng))


def _vary(text: str, domain: Domain, rng: random.Random) -> str:
    if domain == "chat":
        return text + rng.choice(parts.CHAT_ENDS)
    if domain == "code":
        return text + rng.choice(parts.CODE_ENDS)
    text = re.sub(r"\d+", lambda m: str(_near(int(m[0]), rng)), text)
    names = set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}\b", text)) - parts.NOT_NAMES
    for name in sorted(names):
        text = re.sub(rf"\b{name}\b", rng.choice(parts.NAMES), text)
    return text


def _near(number: int, rng: random.Random) -> int:
    return number if number < 2 or 1900 <= number < 2100 else rng.randint(max(2, number // 2), number * 2)


def _chat(rng: random.Random) -> str:
    topic, other = rng.sample(parts.TOPICS, 2)
    form = rng.choice(parts.CHAT_FORMS)
    text = form.format(topic=topic, other=other, person=rng.choice(parts.PEOPLE), n=rng.randint(2, 7),
                       thing=rng.choice(parts.THINGS), place=rng.choice(parts.PLACES),
                       style=rng.choice(parts.STYLES))  # fmt: skip
    return text + rng.choice(parts.CHAT_ENDS)


def _code(rng: random.Random) -> str:
    if rng.random() < 0.4:
        name, signature, summary = rng.choice(_library())
        if rng.random() < 0.5:
            head = f'def {name}{signature}:\n    """{summary}"""'
            return f"Complete the following Python function.\n\n```python\n{head}\n```"
        return rng.choice(parts.CODE_ASKS).format(task=f"`{name}{signature}`: {summary}")
    task = rng.choice(parts.CODE_VERBS).format(
        what=rng.choice(parts.CODE_OBJECTS), rule=rng.choice(parts.CODE_RULES), n=rng.randint(2, 12)
    )
    text = rng.choice(parts.CODE_ASKS).format(task=task)
    return text + rng.choice(parts.CODE_ENDS)


def _math(rng: random.Random) -> str:
    a, b = rng.sample(parts.NAMES, 2)
    x, y = rng.sample(parts.GOODS, 2)
    numbers = {k: rng.randint(*bounds) for k, bounds in parts.NUMBER_RANGES.items()}
    opening, step, question = rng.choice(parts.MATH_OPENINGS), rng.choice(parts.MATH_STEPS), None
    if rng.random() < 0.5:
        whole = rng.choice(parts.MATH_WHOLE)
        return whole.format(a=a, b=b, x=x, y=y, **numbers)
    question = rng.choice(parts.MATH_QUESTIONS)
    return " ".join((opening, step, question)).format(a=a, b=b, x=x, y=y, **numbers)


@cache
def _library() -> list[tuple[str, str, str]]:
    """Name, signature and first doc line of the standard library's Python functions."""
    found = {}
    for module_name in parts.LIBRARY:
        for name, value in vars(import_module(module_name)).items():
            if name.startswith("_") or not inspect.isfunction(value) or not value.__doc__:
                continue
            summary = " ".join(value.__doc__.strip().split("\n\n")[0].split())
            signature = str(inspect.signature(value))
            if 20 < len(summary) < 300 and len(signature) < 120:
                found[name] = (name, signature, summary)
    return [found[name] for name in sorted(found)]
