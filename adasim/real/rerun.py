"""The trainer's own teacher: full blocks of the drafter in training, judged by the target.

Served rounds show how far an older drafter came, and only where a whole block was verified. Running the target
over fresh drafts costs trainer time and gives the length head labels of the drafter it belongs to.
"""

import random

import torch
from torch import Tensor

from adasim.real.drafter import DrafterShape, Weights, block_hidden
from adasim.real.kv import Span
from adasim.real.layers import Rope
from adasim.real.samples import Sample
from adasim.real.sampling import Sampling
from adasim.real.target import Target
from adasim.real.train_head import Blocks
from adasim.real.verify import accept_greedy, accept_sampled


class Teacher:
    """Runs the target over drafted blocks.

    Args:
        vocab: token ids of the draft vocabulary, sorted [V'].
        sampling: as in serving, so that acceptance means the same.
    """

    def __init__(self, target: Target, vocab: Tensor, sampling: Sampling, seed: int = 0) -> None:
        self.target, self.vocab, self.sampling = target, vocab.to(target.device), sampling
        self.head = target.head_weight[self.vocab]
        self.rng, self.generator = random.Random(seed), torch.Generator(target.device).manual_seed(seed)

    @torch.no_grad()
    def blocks(self, shape: DrafterShape, weights: Weights, rope: Rope, sample: Sample, count: int) -> Blocks | None:
        """``count`` blocks at random positions of a sample's answer; None when it is too short."""
        text = sample.lesson.text
        allowed = range(text.prompt_len, len(text.tokens) - 1)
        if not allowed:
            return None
        starts = sorted(self.rng.sample(allowed, min(count, len(allowed))))
        tokens = torch.tensor(text.tokens.tolist(), device=self.target.device)
        context = sample.lesson.hidden_tensor()[None, : starts[-1]].to(self.target.device, self.target.dtype)
        at = torch.tensor(starts, device=self.target.device)
        hidden = block_hidden(
            shape, weights, self.target.embedding, rope, context, tokens[at][None], at[None], shape.block
        )[0, :, 1:]  # fmt: skip
        logits = hidden @ self.head.T
        if self.sampling.greedy:
            rows, q = logits.argmax(-1), None
        else:
            q = self.sampling.probabilities(logits)
            rows = torch.multinomial(q.flatten(0, 1), 1, generator=self.generator).view(len(starts), -1)
        drafts = self.vocab[rows]
        runs = self._runs(tokens, starts, drafts, q)
        return Blocks(hidden.clone(), torch.tensor(runs, device=hidden.device))

    def _runs(self, tokens: Tensor, starts: list[int], drafts: Tensor, q: Tensor | None) -> list[int]:
        """L of each block: the target runs over the text once, then over each block, the last one first."""
        kv = self.target.cache(1, starts[-1] + drafts.shape[1] + 1)
        self.target.forward(tokens[: starts[-1]], [Span(0, 0, starts[-1])], kv)
        runs = []
        for i in reversed(range(len(starts))):  # a block overwrites what follows its anchor
            packed = torch.cat([tokens[starts[i]][None], drafts[i]])
            hidden, _ = self.target.forward(packed, [Span(0, starts[i], len(packed))], kv)
            logits, ids = self.target.logits(hidden), [drafts[i].tolist()]
            if q is None:
                verdict = accept_greedy(logits.argmax(-1).tolist(), ids)[0]
            else:
                p = self.sampling.probabilities(logits)
                verdict = accept_sampled(p, [q[i]], ids, self.generator, self.vocab)[0]
            runs.append(verdict.accepted)
        return runs[::-1]
