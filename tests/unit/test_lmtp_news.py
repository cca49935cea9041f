"""News of what streams wait for: a few times a second, none is lost, and none comes behind the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from specsplit.gateway.lmtp.messages import Item
from specsplit.gateway.lmtp.news import PERIOD_S, StreamNews
from tests.support.virtual_time import run_virtual


class Told:
    """Keeps the numbers of the streams that had news."""

    def __init__(self) -> None:
        self.stream_ids: list[int] = []
        self.news = StreamNews(self._tell)

    async def _tell(self, take: Callable[[], list[Item]]) -> None:
        self.stream_ids += [item["stream_id"] for item in take()]


@pytest.mark.parametrize("pause_s", [0.0, PERIOD_S, 2 * PERIOD_S])
def test_no_news_are_lost_whenever_they_come(pause_s: float) -> None:
    """Those that come after one period come in the turn of the event loop in which the telling ends."""

    async def main() -> list[int]:
        told = Told()
        told.news.put({"stream_id": 1})
        await asyncio.sleep(0)
        await asyncio.sleep(pause_s)
        told.news.put({"stream_id": 2})
        await asyncio.sleep(3 * PERIOD_S)
        await told.news.close()
        return told.stream_ids

    assert run_virtual(main) == [1, 2]


def test_behind_the_end_there_are_no_news() -> None:
    async def main() -> list[int]:
        told = Told()
        told.news.put({"stream_id": 1})
        await asyncio.sleep(0)
        await told.news.close()
        told.news.put({"stream_id": 2})
        await asyncio.sleep(PERIOD_S)
        return told.stream_ids

    assert run_virtual(main) == [1]
