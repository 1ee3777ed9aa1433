"""The DFLASH drafter with AdaFlash's length head, as one module: a draft-only weight update reaches both."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.models.dflash import DFlashDraftModel
from torch import Tensor

from adasim.errors import InputError
from adasim.real.checkpoint import HEAD_PREFIX, check_weights, read_shape
from adasim.real.length_head import PaperHead, ReleasedHead, load_head


class AdaFlashDraftModel(DFlashDraftModel):  # type: ignore[misc]
    """Loads what ``adasim train ship`` writes. The head's form shows in its weights, so it is built when they come."""

    length_head: PaperHead | ReleasedHead | None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.length_head = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load drafter and head; the first call builds the head, later ones update it in place.

        Everything is checked before anything is written, so that refused weights leave the old ones whole.

        Raises:
            InputError: a tensor is missing, unknown, of another shape, or not finite.
        """
        found = dict(weights)
        head = {k.removeprefix(HEAD_PREFIX): w for k, w in found.items() if k.startswith(HEAD_PREFIX)}
        drafter = {k: w for k, w in found.items() if not k.startswith(HEAD_PREFIX)}
        problems = check_weights(read_shape(self.config.to_dict(), Path("draft checkpoint")), drafter)
        problems += self._check_head(head)
        if problems:
            raise InputError(*problems)
        super().load_weights(iter(drafter.items()))
        if head and self.length_head is None:
            self.length_head = load_head(head).float().to(self.norm.weight.device)
        elif self.length_head is not None:
            with torch.no_grad():
                for name, parameter in self.length_head.named_parameters():
                    parameter.copy_(head[name])

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """One pass over blocks. SGLang casts ``input_embeds`` to bf16 on the way, whatever the model runs in."""
        if input_embeds is not None:
            input_embeds = input_embeds.to(self.norm.weight.dtype)
        return super().forward(input_ids, positions, forward_batch, input_embeds, get_embedding, pp_proxy_tensors)

    def _check_head(self, weights: dict[str, Tensor]) -> list[str]:
        """What is wrong with a head's tensors; a first head may have any of the published forms."""
        problems = [f"tensor {HEAD_PREFIX}{k} is not finite" for k, w in weights.items() if not torch.isfinite(w).all()]
        if self.length_head is None:
            return problems
        own = dict(self.length_head.named_parameters())
        problems += [f"tensor {HEAD_PREFIX}{k} is missing" for k in own if k not in weights]
        problems += [f"tensor {HEAD_PREFIX}{k} is unknown" for k in weights if k not in own]
        return problems + [
            f"tensor {HEAD_PREFIX}{k} has shape {list(w.shape)}, expected {list(own[k].shape)}"
            for k, w in weights.items()
            if k in own and w.shape != own[k].shape
        ]
