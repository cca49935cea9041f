"""The workers that the settings ask for: engines over models loaded here, clients of workers elsewhere, or both."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from specsplit.assembly.links import orchestrator_security, remote_draft, remote_target, remote_workers
from specsplit.assembly.local import local_draft, local_target, local_workers
from specsplit.assembly.models import LoadedDraft, Models
from specsplit.assembly.workers import Placement, Workers
from specsplit.core.settings import Settings
from specsplit.core.types import Note


def open_workers(
    settings: Settings, models: Models | LoadedDraft | None, note: Note | None = None
) -> AbstractAsyncContextManager[Workers]:
    """Run engines over `models`, and connect to the workers elsewhere, for the length of the block.

    `note` is called with what the user should know meanwhile.
    """
    if models is None:
        return remote_workers(settings, note)
    chosen = settings.orchestrator
    is_auto = chosen.mode == "auto"
    # Ping-pong asks the target what a branch takes, unless the user has said how trees branch.
    measures_target = is_auto or (chosen.mode == "pingpong" and chosen.branching is None)
    if isinstance(models, LoadedDraft):
        return _with_remote_target(settings, models, note, measures=is_auto)
    if settings.draft_address is not None:
        return _with_remote_draft(settings, settings.draft_address, models, measures=measures_target)
    return local_workers(
        models,
        side_by_side=settings.runs_side_by_side,
        measures_target=measures_target,
        measures_draft=is_auto,
        prefix_reuse=settings.target.prefix_reuse,
    )


@asynccontextmanager
async def _with_remote_target(
    settings: Settings, models: LoadedDraft, note: Note | None, *, measures: bool
) -> AsyncGenerator[Workers]:
    async with AsyncExitStack() as stack:
        target = remote_target(settings, orchestrator_security(settings), note)
        verifier, tokenizer = await stack.enter_async_context(target)
        drafter = await stack.enter_async_context(
            local_draft(models.draft, measures=measures, prefix_reuse=settings.draft.prefix_reuse)
        )
        placement = Placement(is_remote=True, max_requests=models.max_sessions)
        workers = Workers(verifier, drafter, tokenizer, placement)
        stack.push_async_callback(workers.aclose)
        yield workers


@asynccontextmanager
async def _with_remote_draft(
    settings: Settings, address: str, models: Models, *, measures: bool
) -> AsyncGenerator[Workers]:
    async with AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(
            local_target(models.target, measures=measures, prefix_reuse=settings.target.prefix_reuse)
        )
        drafter = await stack.enter_async_context(remote_draft(address, orchestrator_security(settings)))
        # A stream gains where a round trip lies between two steps of the target, and none does.
        placement = Placement(is_remote=True, auto_modes=("overlap", "pingpong"), max_requests=models.max_sessions)
        workers = Workers(verifier, drafter, models.tokenizer, placement)
        stack.push_async_callback(workers.aclose)
        yield workers
