"""What advice rests on: a profile, measurements that one is fitted to, or nothing but specifications."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adasim.calibration.acceptance import CurveAcceptance
from adasim.calibration.adjust import Uncertainty
from adasim.calibration.cost import Overhead, TableCost
from adasim.calibration.from_throughput import Posterior
from adasim.calibration.kernel_tables import kernel_cost
from adasim.calibration.luck import HeadQuality
from adasim.calibration.profile import Profile, Provenance, packaged
from adasim.calibration.roofline import LayersDraft, RooflineCost
from adasim.calibration.specs import HARDWARE, MODELS
from adasim.calibration.survival import Anchored, Budgets, Hardened, Measured
from adasim.calibration.throughput_profile import fitted_profile
from adasim.errors import InputError

ONE_PASS_DRAFTS, CHAIN_DRAFTS = 15, 7  # of a block where nobody says: DFlash's, and the longest chain that is common
PUBLISHED_TAU = 5.86  # DFlash on Qwen3-8B, block 16, mean of six sets (AdaFlash, arXiv 2607.19223, Table 1)
PUBLISHED_SHAPE = Anchored(first=0.89, last=0.13, tau=7.09)  # its survival on MathQA (the same, Figure 2c)
PUBLISHED_HEAD = HeadQuality(noise=2.9)  # tokens, fitted to D-Cut (arXiv 2607.14647)
HOST_MS = 1.2  # of a speculative round beside its passes: D-Cut on vLLM, and SpecDecode-Bench on an H100
UNMEASURED = Uncertainty(verify=0.3, draft=0.4, overhead=0.8, prefill=0.3, acceptance=0.3, head_noise=0.4, head_bias=1.0)


@dataclass(frozen=True, slots=True)
class Known:
    """Cost and acceptance, and how well they are known.

    Attributes:
        profile: the most probable ones.
        file: where a scenario finds it; None = made here, and to be written.
        sources: what to name in a command that builds on it.
        posterior: other worlds that explain the measurements; None = the profile states intervals.
        measured: false = nobody measured this hardware.
        max_draft_len: drafts of a full block.
    """

    profile: Profile
    file: str | None
    sources: list[str]
    posterior: Posterior | None = None
    measured: bool = True
    max_draft_len: int = ONE_PASS_DRAFTS
    notes: list[str] = field(default_factory=list)

    @property
    def one_pass(self) -> bool:
        """The drafter fills its block in one pass, whatever the length: it drafts all of it."""
        return not self.profile.cost.draft.autoregressive

    @property
    def has_head(self) -> bool:
        """Whether somebody says how good a length or confidence head is."""
        return "head" in self.profile.acceptance.model_fields_set

    @property
    def chains(self) -> bool:
        """Whether drafts of the engine's own drafter were measured, not trees alone."""
        return self.posterior is None or any(r.k and not r.tree for r in self.posterior.rows)

    @property
    def domains(self) -> list[str]:
        """Domains with an acceptance of their own."""
        model = self.profile.acceptance
        return sorted(model.curves) if isinstance(model, CurveAcceptance) else []

    @property
    def batches(self) -> tuple[int, int] | None:
        """Smallest and largest batch that was measured; None = nobody says."""
        cost = self.profile.cost
        if not self.measured:
            return None
        if self.posterior is not None:
            found = [float(r.batch) for r in self.posterior.rows if r.tok_s is not None]
        elif "batch" in self.profile.fitted:
            found = self.profile.fitted["batch"]
        elif isinstance(cost, TableCost):
            found = list(cost.batches)
        else:
            return None
        return int(min(found)), int(max(found))


def known_of(
    data: Sequence[str],
    *,
    hardware: str | None = None,
    model: str | None = None,
    accept_len: float | None = None,
    draft_layers: int | None = None,
    kernels: bool = False,
    max_draft_len: int | None = None,
    only: str | None = None,
    concurrency: int | None = None,
    one_pass: bool = False,
) -> Known:
    """What the given data tell.

    Args:
        data: one profile (a packaged name or a .yaml file), files that ``adasim import`` reads and folders it wrote, or
            nothing: then hardware and model are priced by the roofline.
        hardware: of ``calibration.specs``.
        model: of the same.
        accept_len: tokens per round of a full block, where nothing was measured.
        draft_layers: of the drafter, where nothing was measured.
        kernels: price from measured kernels instead of a roofline, where nothing was measured.
        max_draft_len: drafts of a full block.
        only: fit runs whose label, model or data set holds this.
        concurrency: of runs that do not tell theirs.
        one_pass: the drafter of fitted runs fills its block in one pass.

    Raises:
        InputError: everything that is wrong.
    """
    names = {p.stem for p in packaged()}
    profiles = [d for d in data if d in names or d.endswith((".yaml", ".yml"))]
    problems = []
    fit = {"--only": only, "--fit-concurrency": concurrency, "--one-pass": one_pass or None}
    idle = [name for name, value in fit.items() if value is not None] if profiles or not data else []
    problems += [f"{name} has no effect: it chooses among measurements to fit" for name in idle]
    if data and kernels:
        problems.append("--kernels has no effect: the data tell the times")
    if data and accept_len is not None:
        problems.append("--accept-len has no effect: the data tell the acceptance")
    if profiles and len(data) > 1:
        problems.append(f"DATA: one profile, or measurements to fit; not {', '.join(data)} together")
    if not data and not (hardware and model):
        problems.append(
            "DATA: give a profile or benchmark files; or --hardware and --model, to be priced from specifications"
        )
    for option, value, specs in (("--hardware", hardware, HARDWARE), ("--model", model, MODELS)):
        if value is not None and value not in specs:
            problems.append(f"{option} {value}: unknown; allowed: {', '.join(sorted(specs))}")
    if problems:
        raise InputError(*problems)
    if not data:
        drafter = LayersDraft() if draft_layers is None else LayersDraft(layers=draft_layers)
        return _unmeasured(
            str(hardware), str(model), accept_len, drafter, max_draft_len or ONE_PASS_DRAFTS, kernels=kernels
        )
    if profiles:
        return _profile(profiles[0], max_draft_len)
    profile, posterior = fitted_profile(
        [Path(d) for d in data], "profile", only=only, concurrency=concurrency, one_pass=one_pass
    )
    longest = max(r.k for r in posterior.rows)
    return Known(profile, None, list(data), posterior, max_draft_len=max_draft_len or longest)


def _profile(name: str, max_draft_len: int | None) -> Known:
    profile = Profile.load(name)
    cost = profile.cost
    guessed = isinstance(cost, RooflineCost) and cost.fitted_tokens is None
    longest = max_draft_len or _longest(profile)
    return Known(
        profile,
        name,
        [name],
        measured=not guessed,
        max_draft_len=longest,
        notes=[m for m in profile.marks if m not in profile.notes],
    )


def _longest(profile: Profile) -> int:
    """Drafts of a block, as far as the acceptance tells."""
    model = profile.acceptance
    known = []
    for curve in model.curves.values() if isinstance(model, CurveAcceptance) else ():
        if isinstance(curve, Measured):
            known.append(len(curve.values))
        elif isinstance(curve, Budgets):
            known.append(max(curve.tokens) - 1)
    return min(known, default=CHAIN_DRAFTS if profile.cost.draft.autoregressive else ONE_PASS_DRAFTS)


def _unmeasured(
    hardware: str, model: str, accept_len: float | None, drafter: LayersDraft, max_draft_len: int, *, kernels: bool
) -> Known:
    """Specifications, and what others published."""
    tau = accept_len or PUBLISHED_TAU
    if not 1 < tau < max_draft_len + 1:
        raise InputError(f"--accept-len {tau:g}: allowed between 1 and a block of {max_draft_len + 1}, both exclusive")
    cost: TableCost | RooflineCost
    if kernels:
        cost, source = kernel_cost(hardware, MODELS[model], drafter.layers, HOST_MS)
        times = f"times are sums of kernels that others measured ({source}); no engine was measured here"
    else:
        cost = RooflineCost(hardware=hardware, model=model, draft=drafter, overhead=Overhead(speculative_ms=HOST_MS))
        times = (
            "times follow from data sheets (memory at 80 %, arithmetic at 60 % of peak), never compared with an engine"
        )
    assumed = [
        times,
        f"{HOST_MS} ms of host time in every speculative round, as published for two engines",
        f"a drafter like DFlash: one pass, {drafter.layers} layers of the model's shape, {max_draft_len} drafts",
        f"{tau:g} tokens per round of a full block, "
        + ("as given" if accept_len else "published for DFlash on Qwen3-8B; yours is another"),
        "a length head as good as the one published with D-Cut (2.9 tokens)",
    ]
    profile = Profile(
        name=f"{hardware}-{model}",
        provenance=Provenance(
            source="data sheets and published figures: nothing was measured here",
            hardware=hardware,
            model=model,
            engine="none",
            date="none",
            how="sum of kernels that others measured" if kernels else "roofline from specifications",
            inputs=[f"specifications of {hardware} and {model} (adasim list hardware, adasim list models)"],
            assumptions=assumed,
        ),
        cost=cost,
        acceptance=CurveAcceptance(curves={"default": Hardened(tau=tau, of=PUBLISHED_SHAPE)}, head=PUBLISHED_HEAD),
        uncertainty=UNMEASURED,
    )
    return Known(profile, None, [], measured=False, max_draft_len=max_draft_len)
