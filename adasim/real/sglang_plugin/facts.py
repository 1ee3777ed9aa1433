"""What a server says of itself: whoever measures it must know what it measures."""

import platform
from pathlib import Path
from typing import Any

import torch

from adasim import __version__
from adasim.identity import processor
from adasim.real.asked import config_sha256


def facts_of(worker: Any, scheduler: Any) -> dict[str, Any]:
    """JSON: engine, model, machine, and the limits that were found when the model was loaded."""
    caps, settings = worker.decider.caps, worker.settings
    return {
        "adasim": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": worker.device,
        "hardware": processor() if worker.device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(worker.model_runner.dtype).removeprefix("torch."),
        "target_config_sha256": config_sha256(Path(scheduler.server_args.model_path)),
        "drafter_config_sha256": config_sha256(Path(scheduler.server_args.speculative_draft_model_path)),
        "block": caps.block,
        "max_running_requests": caps.max_running_requests,
        "captured_tokens": list(caps.captured_tokens),
        "kv_tokens": scheduler.max_total_num_tokens,
        "page_size": scheduler.page_size,
        "policy": worker.decider.driver.policy.model_dump(mode="json"),
        "provides": sorted(caps.provides),
        "experiments": settings.experiments,
        "kept_rounds": settings.kept_rounds,
        "draft_version": worker.decider.version,
        "next_step": worker.decider.step,
    }
