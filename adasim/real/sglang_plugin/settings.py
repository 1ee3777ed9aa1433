"""What a server is told beside SGLang's own arguments: which policy decides the lengths."""

import os
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from adasim.calibration.roofline import AnyCost
from adasim.errors import InputError
from adasim.explain import explain
from adasim.policies import AnyPolicy
from adasim.policies.base import Policy
from adasim.policies.scheduler import AnyScheduler, Fcfs
from adasim.real.opd import Opd
from adasim.types import Component

VARIABLE = "ADASIM_POLICY"
FILE = "adasim_policy.json"
DOMAIN = "adasim_domain"  # of a request, in SGLang's ``custom_params``


class ServedOpd(Opd):
    """On-policy distillation of a server's drafter, by a trainer beside it (``distillation``).

    Attributes:
        folder: shared by server and trainer, on a disk that both see. Buffers and versions that nobody needs any longer
            are deleted, unless ``keep`` names the folder, too.
    """

    folder: str

    @model_validator(mode="after")
    def _one_folder(self) -> Self:
        if self.keep not in (None, self.folder):
            raise ValueError(f"keep: {self.keep}; allowed: null, or {self.folder} as folder says")
        return self


class Settings(Component):
    """One JSON document, beside the draft checkpoint or named by ``ADASIM_POLICY``.

    Attributes:
        policy: any of ``adasim list``, by kind and fields.
        scheduler: who is admitted. SGLang's own scheduler admits, by ``--schedule-policy``: only ``fcfs`` is taken.
        cost: what the policy may know of time; null = policies that ask for it are refused.
        opd: what the server shows a trainer; null = nothing.
        kept_rounds: steps whose records are kept to be read from outside, until a reader says it has them; 0 = none.
        experiments: take orders that measurements need: acceptance by decree, requests held back to begin together,
            another cost. Whoever may call ``/set_internal_state`` can then spoil every answer: not for serving.
    """

    policy: AnyPolicy
    scheduler: AnyScheduler = Fcfs()
    cost: AnyCost | None = None
    opd: ServedOpd | None = None
    kept_rounds: int = Field(default=256, ge=0)
    experiments: bool = False

    @model_validator(mode="after")
    def _admits(self) -> Self:
        if self.scheduler.kind != "fcfs":
            raise ValueError(
                f"scheduler: {self.scheduler.kind} cannot run inside SGLang, which admits by --schedule-policy and "
                "reserves KV slots of a whole block for every running request; allowed: fcfs"
            )
        return self


def read_settings(draft: str | None) -> Settings:
    """The settings of a server whose draft checkpoint lies in ``draft``.

    ``ADASIM_POLICY`` holds the JSON itself or a path to it, and goes before ``adasim_policy.json`` beside the checkpoint.

    Raises:
        InputError: neither is there, or what is wrong in it.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if given.startswith("{"):
        return parse_settings(given, VARIABLE)
    path = Path(given).expanduser() if given else Path(draft or "") / FILE
    if not path.is_file():
        where = f"{VARIABLE}: {path}" if given else f"ADAFLASH: {VARIABLE} is not set, and {path}"
        raise InputError(f'{where} is not there; a policy looks like {{"policy": {{"kind": "head"}}}}')
    return parse_settings(path.read_text(), str(path))


def parse_policy(text: str, where: str) -> Policy:
    """The policy alone, for a server that runs: what else settings hold stays as it was at the start.

    Raises:
        InputError: every problem, with its place; what cannot be changed is one.
    """
    given = parse_settings(text, where)
    fixed = sorted(given.model_fields_set - {"policy"})
    if fixed:
        raise InputError(*(f"{where}: {name} stays as it was at the start; allowed: policy" for name in fixed))
    return given.policy


def parse_opd(text: str, where: str) -> ServedOpd | None:
    """What a running server shows a trainer from now on; ``null`` = nothing.

    Raises:
        InputError: every problem, with its place.
    """
    if text.strip() == "null":
        return None
    try:
        return ServedOpd.model_validate_json(text)
    except ValidationError as error:
        raise InputError(*(f"{where}: {line}" for line in explain(error, ServedOpd))) from error


def parse_settings(text: str, where: str) -> Settings:
    """Settings from JSON.

    Raises:
        InputError: every problem, with its place.
    """
    try:
        return Settings.model_validate_json(text)
    except ValidationError as error:
        raise InputError(*(f"{where}: {line}" for line in explain(error, Settings))) from error
