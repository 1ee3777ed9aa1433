"""What reaches from SGLang's scheduler process into the worker: queue length in, records out, orders in, that it is the
server's turn, and new weights, which are refused without harm when they do not fit.
"""

import time
from collections.abc import Callable
from typing import Any

from adasim.errors import InputError
from adasim.real.sglang_plugin.orders import PREFIX, Orders, Play, read_orders


def open_scheduler() -> None:
    """Register the hooks in a scheduler process, before its scheduler loads a model."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    parts = "sglang.srt.managers.scheduler_components."
    state, updates = "internal_state.SchedulerInternalStateController", "weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", _tell_queue, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill", _hold, HookType.AROUND)
    HookRegistry.register(f"{parts}{state}._add_speculative", _add_rounds, HookType.AFTER)
    HookRegistry.register(f"{parts}{state}.set_internal_state", _obey, HookType.AROUND)
    HookRegistry.register(f"{parts}{updates}.update_weights_from_tensor", _refuse_bad_weights, HookType.AROUND)
    HookRegistry.register(f"{parts}{updates}.end_weight_update", _refresh, HookType.AFTER)
    HookRegistry.apply_hooks()
    Scheduler.adasim_policy = _use_policy
    Scheduler.adasim_opd = _use_tap


def _tell_queue(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Before every step: how many requests wait, and how many tokens are held. The step waits for the server's turn."""
    decider = scheduler.draft_worker.decider
    scheduler.draft_worker.turn.wait(decider.emitted)
    decider.queued = len(scheduler.waiting_queue)
    decider.kv_tokens = scheduler.max_total_num_tokens - scheduler.token_to_kv_pool_allocator.available_size()


def _hold(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Let nobody in while requests are gathered that are to begin together."""
    player = scheduler.draft_worker.player
    if player.holds(len(scheduler.waiting_queue)):
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    plan = original(scheduler, running_batch)
    player.let_in(len(scheduler.waiting_queue))
    return plan


def _add_rounds(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """``/server_info`` shows what ``RoundLog.dump`` gives and what the worker is, in ``internal_states[i].adasim``."""
    scheduler = controller.scheduler
    worker = scheduler.draft_worker
    worker.decider.settle()
    state["adasim"] = worker.decider.log.dump() | {
        "now_s": time.monotonic(),
        "held": worker.turn.held,
        "running": _running(scheduler),
        "waiting": len(scheduler.waiting_queue),
        "refused": worker.player.refused,
        "opd": None if worker.tap is None else worker.tap.state(),
        **worker.facts(scheduler),
    }


def _running(scheduler: Any) -> int:
    """Requests that are not done; SGLang lets those that are stay until its next step."""
    return sum(not request.finished() for request in scheduler.running_batch.reqs)


def _obey(original: Callable[..., Any], controller: Any, request: Any) -> Any:
    """Take orders; everything else is SGLang's."""
    names = [name for name in request.server_args if name.startswith(PREFIX)]
    if not names:
        return original(controller, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    problems = list[str]()
    for name in names:
        try:
            _carry_out(read_orders(name), controller.scheduler)
        except InputError as error:
            problems += error.problems
    controller.scheduler.draft_worker.player.refused = "\n".join(problems)
    return SetInternalStateReqOutput(updated=not problems)


def _carry_out(orders: Orders, scheduler: Any) -> None:
    """Where plain decoding ends, prompts that it left in the prefix cache are forgotten: no drafter has followed them.

    Raises:
        InputError: why not.
    """
    player, busy = scheduler.draft_worker.player, _running(scheduler) + len(scheduler.waiting_queue)
    begins = orders.play is not None and orders.play.policy.loads_drafter and not player.follows and not busy
    if begins and not scheduler.server_args.disable_radix_cache and not scheduler.flush_cache():
        raise InputError("play: requests are just leaving; give the order again")
    player.obey(orders, busy)


def _refuse_bad_weights(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """SGLang would let the scheduler die; the draft model checks before it writes, so the old weights go on serving.

    Whatever else may happen to a drafter costs acceptance, no token: serving goes on.
    """
    try:
        answer = original(updater, request)
    except Exception as error:
        if request.selector != "draft" and not isinstance(error, InputError):
            raise
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

        said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return UpdateWeightsFromTensorReqOutput(success=False, message=said)
    if answer.success and request.selector == "draft":
        name = request.weight_version or ""
        updater.draft_worker.decider.version = int(name) if name.isdecimal() else 0
    return answer


def _refresh(result: Any, updater: Any, *args: Any) -> None:
    """After an update: what the worker derived from draft weights is made again."""
    updater.draft_worker.refresh_after_reload()


def _use_policy(scheduler: Any, settings: str) -> None:
    """``engine.collective_rpc("adasim_policy", settings=...)``: decide by another policy from the next round on.

    Args: settings: the JSON of ``Settings`` with a policy alone; the rest stays as it was at the start.
    """
    from adasim.real.sglang_plugin.settings import parse_policy

    _carry_out(Orders(play=Play.model_validate({"policy": parse_policy(settings, "adasim_policy")})), scheduler)


def _use_tap(scheduler: Any, settings: str) -> None:
    """``engine.collective_rpc("adasim_opd", settings=...)``: show a trainer something from now on, or nothing any more.

    Args: settings: the JSON of ``ServedOpd``, or ``null``.
    """
    from adasim.real.sglang_plugin.settings import parse_opd

    scheduler.draft_worker.show(parse_opd(settings, "adasim_opd"))
