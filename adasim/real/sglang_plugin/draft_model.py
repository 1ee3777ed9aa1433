"""The DFLASH drafter with AdaFlash's length head, as one module: a draft-only weight update reaches both."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.models.dflash import DFlashDraftModel
from torch import Tensor

from adasim.errors import InputError
from adasim.real.checkpoint import HEAD_PREFIX, check_tensors, check_weights, read_shape
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
        head = {k: w for k, w in found.items() if k.startswith(HEAD_PREFIX)}
        drafter = {k: w for k, w in found.items() if not k.startswith(HEAD_PREFIX)}
        own = {} if self.length_head is None else dict(self.length_head.named_parameters())
        sizes = {HEAD_PREFIX + k: tuple(p.shape) for k, p in own.items()} or {k: tuple(w.shape) for k, w in head.items()}
        problems = check_weights(read_shape(self.config.to_dict(), Path("draft checkpoint")), drafter)
        problems += check_tensors(sizes, head)
        first = None
        if head and self.length_head is None:
            try:
                first = load_head({k.removeprefix(HEAD_PREFIX): w for k, w in head.items()}).float()
                first(first.out.weight.new_zeros(1, 1, int(self.config.hidden_size)))
            except (KeyError, RuntimeError, ValueError) as error:
                problems.append(f"{HEAD_PREFIX}*: no length head of this drafter has these tensors: {error}")
        if problems:
            raise InputError(*problems)
        super().load_weights(iter(drafter.items()))
        if first is not None:
            self.length_head = first.to(self.norm.weight.device)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(head[HEAD_PREFIX + name])

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
