"""A coordinator restores its chain in the background, whatever error comes in between."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from specsplit.core.errors import SpecSplitError, WorkerUnreachable
from specsplit.stages.serve import LOOK_S, mend_chain
from tests.support.virtual_time import run_virtual


class Failing:
    """A chain that is not whole and its engine: one of them fails twice."""

    def __init__(self, error: Exception, *, is_chain: bool) -> None:
        self.trouble: SpecSplitError | None = WorkerUnreachable("a stage is lost")
        self.num_tried = 0
        self._error, self._is_chain, self._num_mended = error, is_chain, 0

    async def mend(self) -> None:
        self._num_mended += 1
        if self._is_chain and self._num_mended <= 2:
            raise self._error
        self.trouble = None

    async def check_device(self) -> None:
        self.num_tried += 1
        if not self._is_chain and self.num_tried <= 2:
            raise self._error


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("error", [WorkerUnreachable("it is away"), RuntimeError("a device failed")])
def test_no_error_ends_it(error: Exception, is_chain: bool, caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(error, is_chain=is_chain)

    async def main() -> None:
        mending = asyncio.create_task(mend_chain(cast(Any, failing), cast(Any, failing)))
        await asyncio.sleep(4.5 * LOOK_S)
        assert not mending.done()
        mending.cancel()

    run_virtual(main)
    assert failing.trouble is None
    assert failing.num_tried >= 2
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == isinstance(error, RuntimeError), "what is not ours is said, and not again while it lasts"
