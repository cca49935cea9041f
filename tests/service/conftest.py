"""Services are tested on the event loop that serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from specsplit.engine import event_loop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"ours": event_loop.new_event_loop}
