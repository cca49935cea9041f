"""Workers in this process: an engine over each loaded model, on the event loop or on a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from specsplit.assembly.models import Models
from specsplit.assembly.workers import Placement, Workers
from specsplit.core import defaults
from specsplit.core.defaults import PrefixReuse
from specsplit.speculation.cost_model import RoundMode

if TYPE_CHECKING:
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.engine import Engine
    from specsplit.engine.executor import Executor
    from specsplit.model.loader import LoadedModel
    from specsplit.target.engine import TargetEngine

E = TypeVar("E", bound="Engine")


@asynccontextmanager
async def local_workers(
    models: Models,
    *,
    side_by_side: bool = False,
    measures_target: bool = False,
    measures_draft: bool = False,
    prefix_reuse: PrefixReuse = defaults.PREFIX_REUSE,
) -> AsyncGenerator[Workers]:
    """Run an engine over each model for the length of the block.

    With `side_by_side` each engine has its own thread, so that the draft works while the target does; otherwise they
    take turns on the event loop, which saves handing work over. `measures_target` and `measures_draft` time forwards
    first, as `auto` needs.
    """
    from specsplit.draft.engine import DraftEngine
    from specsplit.target.engine import TargetEngine

    target_executor, draft_executor = _executors(models, side_by_side=side_by_side)
    target = TargetEngine(models.target, target_executor)
    draft = DraftEngine(models.draft, draft_executor) if models.draft is not None else None
    are_on_loop = target_executor is draft_executor
    auto_modes: tuple[RoundMode, ...] = ("pingpong",) if are_on_loop else ("overlap", "pingpong")
    placement = Placement(is_on_loop=are_on_loop, auto_modes=auto_modes, max_requests=models.max_sessions)
    workers = Workers(target, draft, models.tokenizer, placement)
    # Each request has a slot, but perhaps no memory for its rows: it waits until another one has ended.
    target.open_queue()
    try:
        for engine, measures in ((target, measures_target), (draft, measures_draft)):
            if engine is None:
                continue
            engine.reuse_prefixes(prefix_reuse)
            if measures:
                await engine.measure()
        yield workers
    finally:
        # From the top down: a request may use an engine, and an engine its executor, until the one above has ended.
        await workers.aclose()
        await target.aclose()
        if draft is not None:
            await draft.aclose()
        for executor in {target_executor, draft_executor}:
            await executor.close()


def local_target(
    model: LoadedModel, *, measures: bool, prefix_reuse: PrefixReuse
) -> AbstractAsyncContextManager[TargetEngine]:
    """Run a target's engine on a thread of its own for the length of the block, for a draft that is elsewhere."""
    from specsplit.target.engine import TargetEngine

    return _on_own_thread(TargetEngine, model, measures=measures, prefix_reuse=prefix_reuse)


def local_draft(
    model: LoadedModel, *, measures: bool, prefix_reuse: PrefixReuse
) -> AbstractAsyncContextManager[DraftEngine]:
    """Run a draft's engine on a thread of its own for the length of the block, for a target that is elsewhere."""
    from specsplit.draft.engine import DraftEngine

    return _on_own_thread(DraftEngine, model, measures=measures, prefix_reuse=prefix_reuse)


@asynccontextmanager
async def _on_own_thread(
    make: Callable[[LoadedModel, Executor], E], model: LoadedModel, *, measures: bool, prefix_reuse: PrefixReuse
) -> AsyncGenerator[E]:
    # The event loop is left to the link, whose answers and keepalives no forward should hold up.
    from specsplit.engine.executor import ThreadExecutor

    executor = ThreadExecutor(model.role, model.threads)
    try:
        async with aclosing(make(model, executor)) as engine:
            engine.open_queue()
            engine.reuse_prefixes(prefix_reuse)
            if measures:
                await engine.measure()
            yield engine
    finally:
        await executor.close()


def _executors(models: Models, *, side_by_side: bool) -> tuple[Executor, Executor]:
    """Return the executors of target and draft: the event loop for both, in one OpenMP team, or a thread each.

    A CPU beside a GPU has one of its own as well: it computes with several OpenMP threads, and for a GPU it is one.
    """
    from specsplit.engine.executor import LoopExecutor, ThreadExecutor

    are_unlike = models.draft is not None and models.draft.runner.device.type != models.target.runner.device.type
    if models.draft is None or not (side_by_side or are_unlike):
        executor = LoopExecutor(models.target.threads)
        return executor, executor
    return ThreadExecutor("target", models.target.threads), ThreadExecutor("draft", models.draft.threads)
