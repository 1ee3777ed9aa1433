"""The worker: SGLang's DFLASH worker with another decoding round.

A round drafts blocks as long as the policy says, asks it how much of each to verify, verifies all blocks packed in one
forward of the target, accepts, and writes the hidden states of accepted tokens into the drafter's KV. Prefill, idle
steps, memory and graphs are the base class's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from adasim.errors import InputError
from adasim.real.sglang_plugin.accept import accept, by_decree, committed
from adasim.real.sglang_plugin.decider import Decider, Moments
from adasim.real.sglang_plugin.draft_head import DraftHead
from adasim.real.sglang_plugin.drafting import draft
from adasim.real.sglang_plugin.drawing import draw
from adasim.real.sglang_plugin.facts import facts_of
from adasim.real.sglang_plugin.marks import Marks
from adasim.real.sglang_plugin.packing import Window, open_window
from adasim.real.sglang_plugin.player import Player
from adasim.real.sglang_plugin.rounds import RoundLog
from adasim.real.sglang_plugin.settings import ServedOpd, read_settings
from adasim.real.sglang_plugin.tap import Tap
from adasim.real.sglang_plugin.turn import Turn
from adasim.real.sglang_plugin.verifying import graph_sizes, verify
from adasim.types import EngineCaps, IntArray


class AdaFlashWorker(DFlashWorkerV2):  # type: ignore[misc]
    """Lengths by a policy of adasim, through the PolicyDriver that the simulator and the torch engine use.

    On CUDA, where it has not run yet: the base class's draft graph serves rounds of whole blocks, others are drafted
    eagerly; length head and draft head run beside it. Verification has graphs by tokens, which need
    SGLANG_RAGGED_VERIFY_MODE=compact. Once a round the host waits for the drafts.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if self._is_domino or self.selector is not None or self.lilicorr is not None:
            raise InputError("ADAFLASH: the draft checkpoint has a head of its own; allowed: plain DFlash and AdaFlash")
        self._folder = Path(server_args.speculative_draft_model_path)
        self.settings = read_settings(str(self._folder))
        self._group = get_dp_tp_group()
        self._draft_head = self._make_draft_head()
        self._marks = Marks(self.device)
        self.turn = Turn.of_environment() if self._group.rank_in_group == 0 else Turn()
        self.tap: Tap | None = None
        self._prompt_hidden: Tensor | None = None  # of the prefill that is running [S, taps * D]

    def init_cuda_graphs(self) -> None:
        """Capture what the base class captures; then the engine's limits are known, and the policy starts."""
        super().init_cuda_graphs()
        if self._need_mamba_verify_commit:
            raise InputError("ADAFLASH: targets with recurrent layers cannot be verified at ragged lengths")
        attention = self.model_runner.attn_backend
        if self.device != "cpu" and not attention.supports_ragged_verify_graph:
            raise InputError(f"ADAFLASH: {type(attention).__name__} cannot verify this target's blocks at ragged lengths")
        self.decider = Decider(
            self.settings.policy, self.caps(), RoundLog(self.settings.kept_rounds), self.turn.clock
        )  # fmt: skip
        self.player = Player(self.settings, self.decider, self.show)
        self.show(self.settings.opd)

    def show(self, opd: ServedOpd | None) -> None:
        """Show a trainer what verification shows, from the next requests on. None = nobody.

        Raises:
            InputError: this server cannot show what is asked for.
        """
        wanted = opd if opd is not None and opd.enabled else None
        if wanted is not None and wanted.teacher == "rerun" and not self.server_args.disable_radix_cache:
            raise InputError(
                "opd.teacher: rerun needs whole texts, and prompts from the prefix cache show no beginning; "
                "allowed: none, or start the server with --disable-radix-cache"
            )
        if self._group.rank_in_group:
            return
        if self.tap is not None:
            self.tap.close()
        self.tap = None if wanted is None else Tap(wanted)
        self.decider.full_verify_share = 0.0 if wanted is None else wanted.full_verify_share

    def caps(self) -> EngineCaps:
        """The engine's limits and what it provides."""
        provides = {"survival", "margin"}
        if getattr(self.draft_model, "length_head", None) is not None:
            provides.add("accept_len")
        if self.settings.cost is not None:
            provides.add("cost")
        return EngineCaps(
            max_draft_len=int(self.block_size) - 1,
            max_running_requests=int(self.model_runner.max_running_requests),
            captured_tokens=tuple(graph_sizes(self.model_runner) or ()),
            provides=frozenset(provides),
            cost=self.settings.cost,
        )

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """One step: a round here, everything else in the base class."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            begin = self._marks.now()
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
            if self._group.rank_in_group == 0 and batch.forward_mode.is_extend():
                end = self._marks.now()
                contexts = [known + new for known, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
                moments = Moments(begin, begin, begin, end, self._marks)
                self.decider.prefilled([r.rid for r in batch.reqs], batch.extend_lens, contexts, moments)
            hidden, self._prompt_hidden = self._prompt_hidden, None
            if self.tap is not None and hidden is not None and self.player.forced is None:
                logits = result.logits_output.next_token_logits
                self.tap.prefill(batch.reqs, batch.prefix_lens, hidden, batch.extend_lens, logits)
            return result
        if not isinstance(batch.spec_info, DFlashDraftInputV2):
            raise TypeError(f"ADAFLASH: the running batch carries {type(batch.spec_info).__name__}")
        if self.device != "cpu":  # lengths may come from another stream
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        return self._round(open_window(batch, self.model_runner, self._block_pos_offsets), on_publish, grammar_barrier)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """The scheduler knows what a round accepted; rounds come in order."""
        if self._group.rank_in_group == 0:
            self.decider.accepted(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """The scheduler has let a request go."""
        self.decider.forget(rid)
        if self.tap is not None:
            self.tap.finish(rid)

    def facts(self, scheduler: Any) -> dict[str, Any]:
        """What the server is and how it plays, for ``/server_info``."""
        return facts_of(self, scheduler)

    def refresh_after_reload(self) -> None:
        """New weights are in: make anew what holds copies of old ones, of the target's head or (SGLang's fused KV helper)
        of the drafter's K and V.
        """
        self._draft_head = self._make_draft_head()
        if self._use_fused_kv_materialize:
            self._init_fused_kv_helper()

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Nothing to warn of: draws need no kernel here (see ``accept``), so every device samples."""

    def _maybe_build_draft_sampler(self) -> None:
        """None: drafts are read outside the draft graph, over the draft vocabulary."""

    def _round(self, window: Window, on_publish: Any, grammar_barrier: Any) -> Any:
        """Draft, choose lengths, verify, accept."""
        batch, prefix, info = window.batch, window.batch.seq_lens, window.batch.sampling_info
        begin = self._marks.now()
        draft_input = batch.spec_info  # verification replaces it
        contexts = (prefix + 1).tolist()  # the anchor is known and has no KV yet
        draft_lens = self._first_rank(lambda: self.decider.draft_lens([r.rid for r in batch.reqs], contexts))
        candidates, view = draft(self, window, self._draft_head, draft_lens, self.decider.driver.needs)
        drafted = self._marks.now()
        verify_lens = self._first_rank(lambda: self.decider.verify_lens(view))
        verifying = self._marks.now()
        lengths = torch.from_numpy(verify_lens).to(prefix.device)

        tree = GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None  # before the verification
        output, ran_graph = verify(self, window, candidates, verify_lens)
        if tree is not None:
            logits = output.next_token_logits
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs, tree=tree, sampling_info=info, device=logits.device, barrier=grammar_barrier
            )
            if mask is not None:
                mask.apply(logits)
        target = draw(output.next_token_logits, info, window.positions, verify_lens)
        greedy = info is None or info.is_all_greedy
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, target)
        accepted = accept(candidates, target, lengths)
        if (forced := self.player.forced) is not None:  # after the comparison, whose time is part of a round's
            accepted = by_decree(target, verify_lens, forced, self.player.rng)
        tokens, commit_lens = committed(candidates, accepted), accepted.run.to(torch.int32) + 1
        _report(batch, draft_input, output, tokens, commit_lens)

        new_lens = prefix + commit_lens.to(prefix.dtype)
        if on_publish is not None:
            on_publish(new_lens)
        self._absorb(output.hidden_states, window, commit_lens)
        if self.tap is not None and forced is None:  # what was decreed teaches nothing
            self.tap.round(
                [r.rid for r in batch.reqs], np.array(contexts) - 1, verify_lens, self.decider.whole.tolist(),
                self.decider.version, accepted.run, output.hidden_states, output.next_token_logits,
            )  # fmt: skip
        output.hidden_states = None
        if self._group.rank_in_group == 0:
            self.decider.timed(Moments(begin, drafted, verifying, self._marks.now(), self._marks))
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=tokens.reshape(-1),
            accept_lens=commit_lens,
            cap_lens=lengths.to(torch.int32),
            can_run_cuda_graph=ran_graph,
            next_draft_input=self._make_next_draft_input_decode(bonus_tokens=accepted.token, new_seq_lens=new_lens),
            speculative_num_draft_tokens=window.positions.shape[1],
            new_seq_lens=new_lens,
        )

    def _absorb(self, hidden: Tensor, window: Window, commit_lens: Tensor) -> None:
        """Give the drafter the hidden states [n * B, taps * D] of committed tokens."""
        slots = self._draft_write_ids(window.plan)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.view(slots.numel(), -1),
            cache_loc=slots,
            cache_loc_2d=slots.view(window.slots.shape),
            positions=window.positions.reshape(-1),
            commit_lens=commit_lens,
        )

    def _append_target_hidden_to_draft_kv_by_loc(self, **what: Any) -> None:
        """Nothing for a policy that never drafts: plain decoding must not pay for a drafter that follows."""
        if self.player.follows:
            super()._append_target_hidden_to_draft_kv_by_loc(**what)
        if self.tap is not None and what.get("extend_lens") is not None:
            self._prompt_hidden = what["target_hidden"]  # what a prompt's tokens show is needed once more

    def _make_draft_head(self) -> DraftHead:
        """The target's head for drafting, over the checkpoint's draft vocabulary."""
        head = unwrap_lora_layer(getattr(self.model_runner.model, "lm_head", None))
        weight: Any = getattr(head, "weight", None)
        if not is_dense_head_weight(weight):
            raise InputError("ADAFLASH: the target's head must be dense; allowed: fp16, bf16 or fp32")
        shard = getattr(head, "shard_indices", None)
        if shard is not None:
            weight = weight[: int(shard.num_org_elements)]
        ids = self._folder / "draft_vocab.npy"
        vocab = torch.from_numpy(np.load(ids).astype(np.int64)).to(weight.device) if ids.is_file() else None
        gather = None if self._group.world_size == 1 else lambda x: self._group.all_gather(x, dim=-1)
        return DraftHead(weight, 0 if shard is None else int(shard.org_vocab_start_index), vocab, gather)

    def _first_rank(self, decide: Callable[[], IntArray]) -> IntArray:
        """What rank 0 decides, on every rank: the policy's state and its clock live there only."""
        answer = decide() if self._group.rank_in_group == 0 else np.empty(0, np.int64)
        if self._group.world_size == 1:
            return answer
        return np.array(self._group.broadcast_object(answer.tolist(), src=0), dtype=np.int64)


def _report(batch: Any, draft_input: Any, output: Any, tokens: Tensor, commit_lens: Tensor) -> None:
    """Log-probabilities and sampling masks, for requests that asked."""
    n, block = tokens.shape
    mask = SpeculativeSamplingMaskCapture.from_logits(
        batch.sampling_info,
        next_token_logits=output.next_token_logits,
        draft_input=draft_input,
        draft_token_num=block,
        bs=n,
    )
    if mask is not None:
        output.sampling_mask_output = mask.build_output(out_tokens=tokens, commit_lens=commit_lens)
    if batch.return_logprob:
        compute_spec_logprobs(batch, output, tokens.reshape(-1), chain_stride=block)
