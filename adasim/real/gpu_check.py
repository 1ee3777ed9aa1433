"""One command for a machine with a GPU: what rounds cost there, and whether speculation stays lossless.

    python -m adasim.real.gpu_check --out gpu

Writes one CSV of times a target (verification and drafting over batch x tokens x context) and ``check.json`` with the
machine, versions and the result of the losslessness check. Takes at most ``--minutes`` minutes, eight by default.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adasim.errors import InputError
from adasim.files import to_json, write_atomic
from adasim.lengths import FixedLength
from adasim.policies.base import Policy
from adasim.policies.fixed import Fixed
from adasim.policies.off import Off
from adasim.policies.threshold import Threshold
from adasim.real.asked import DRAFTERS
from adasim.real.backend import TorchBackend
from adasim.real.checkpoint import Checkpoint, save_checkpoint
from adasim.real.draft import Drafter
from adasim.real.drafter import DrafterShape
from adasim.real.pipeline import draft_shape
from adasim.real.profile import measure, provenance, write_csv
from adasim.real.weights import RANDOM, SMOLLM2, load_target
from adasim.workload import Closed

GRID = {"batches": [1, 2, 4, 8, 16, 32, 64], "tokens": [1, 2, 4, 8, 16], "contexts": [128, 1024, 4096]}
SMALL = {"batches": [1, 2], "tokens": [1, 8], "contexts": [32]}


def profile(name: str, device: torch.device, dtype: torch.dtype, budget_s: float, out: Path, *, small: bool) -> Any:
    """Time a target and a fresh drafter for it; writes NAME.csv. Returns its provenance."""
    target = load_target(name, dtype, device)
    shape = draft_shape(target, layers=5 if "8b" in name else 3)
    drafter = Drafter(shape, shape.fresh(0), target)
    grid = SMALL if small else GRID
    contexts = [c for c in grid["contexts"] if c + shape.block <= target.arch.max_context]
    costs = measure(target, drafter, grid["batches"], grid["tokens"], contexts, repeats=9, budget_s=budget_s)
    write_csv(out / f"{name}.csv", costs)
    return provenance(target) | {"draft_layers": shape.arch.layers, "rows": len(costs)}


def lossless(target: str, drafter: str, device: str) -> dict[str, bool]:
    """Whether each policy gives the text of plain decoding, greedy in fp32."""
    workload = Closed(concurrency=4, requests=8, output_len=FixedLength(tokens=48), domains={"code": 1.0, "chat": 1.0})
    fields: dict[str, Any] = {"target": target, "dtype": "float32", "device": device, "ignore_eos": True}
    plain = TorchBackend(**fields).serve(workload, Off(), 0)[1]
    policies: list[Policy] = [Fixed(verify_len=16), Fixed(verify_len=4, draft_len=15), Threshold(threshold=0.3)]
    return {p.label: TorchBackend(**fields, drafter=drafter).serve(workload, p, 0)[1] == plain for p in policies}


def fresh_drafter(target: str, folder: Path) -> str:
    """A checkpoint with random weights that fits ``target``; returns its folder."""
    arch = RANDOM[target]
    shape = DrafterShape(replace(arch, layers=1, qk_norm=True, tied=True), (0, 2), arch.layers, 16, 0)
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, Checkpoint(shape, shape.fresh(0), torch.arange(arch.vocab), {}))
    return str(folder)


def main(arguments: list[str] | None = None) -> None:
    """Run the check.

    Raises:
        InputError: the device is not there.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--targets", nargs="+", default=["random-qwen3-8b", SMOLLM2])
    parser.add_argument("--small", action="store_true", help="A grid of a few points, to try the script.")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("gpu_check: torch sees no CUDA device")
    options.out.mkdir(parents=True, exist_ok=True)
    start, device = time.perf_counter(), torch.device(options.device)
    share_s = 60 * options.minutes * 0.7 / len(options.targets)
    profiles = {n: profile(n, device, torch.bfloat16, share_s, options.out, small=options.small) for n in options.targets}
    checks = {"random-tiny": lossless("random-tiny", fresh_drafter("random-tiny", options.out / "tiny"), options.device)}
    if SMOLLM2 in options.targets and (DRAFTERS / SMOLLM2).is_dir():
        checks[SMOLLM2] = lossless(SMOLLM2, SMOLLM2, options.device)
    report = {"profiles": profiles, "lossless": checks, "seconds": round(time.perf_counter() - start)}
    write_atomic(options.out / "check.json", to_json(report))
    print(to_json(report), end="")


if __name__ == "__main__":
    main()
