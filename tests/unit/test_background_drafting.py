"""Drafting in the background: one call of the draft at a time, whatever is cut, stopped or asked for meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from specsplit.core.types import Budget
from specsplit.orchestrator.draft_client import DraftClient
from specsplit.orchestrator.sources.background import BackgroundDrafting
from tests.support.virtual_time import run_virtual

BUDGET = Budget(4, 2, 2)


class _Draft:
    """Answers nothing, and takes a moment to give a call up."""

    trouble, is_far_behind = None, False

    def __init__(self) -> None:
        self.contract, self.history = self, [1]
        self.num_asked = self.num_under_way = self.most_under_way = 0

    async def ask(self, budget: Budget, **_: Any) -> None:
        self.num_asked += 1
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            await asyncio.sleep(1.0)
        finally:
            await asyncio.sleep(0.03)
            self.num_under_way -= 1


class _Sink:
    num_drafted = 0


async def _asked_behind_a_cut_call() -> tuple[_Draft, BackgroundDrafting]:
    draft = _Draft()
    background = BackgroundDrafting(cast(DraftClient, draft), cast(Any, _Sink()))
    background.grow(BUDGET)
    await asyncio.sleep(0.1)
    background.cut()
    background.grow(BUDGET)
    await asyncio.sleep(0.01)
    return draft, background


def test_a_call_behind_a_cut_one_begins_when_that_has_ended() -> None:
    async def main() -> None:
        draft, background = await _asked_behind_a_cut_call()
        background.cut()
        assert draft.num_asked == 1
        await asyncio.sleep(0.1)
        assert (draft.num_asked, draft.num_under_way, draft.most_under_way) == (2, 1, 1)
        background.cut()
        background.grow(BUDGET)
        await background.end()
        await asyncio.sleep(0.1)
        assert (draft.num_asked, draft.num_under_way) == (2, 0), "nothing follows a session's end"

    run_virtual(main)


def test_no_call_follows_where_a_plan_asks_nothing_of_the_draft() -> None:
    async def main() -> None:
        draft, background = await _asked_behind_a_cut_call()
        background.stop()
        await asyncio.sleep(0.1)
        assert (draft.num_asked, background.is_running) == (1, False)

    run_virtual(main)
