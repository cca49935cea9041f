"""The deadline of one HTTP request, for all that is done for it: encoding, scoring, and each of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specsplit.core.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """`timeout_s` seconds from `began_s` of the event loop's time; None leaves it to the settings."""

    timeout_s: float | None
    began_s: float

    @classmethod
    def from_now(cls, timeout_s: float | None) -> Deadline:
        """Return the deadline of a request that begins now."""
        return cls(timeout_s, asyncio.get_running_loop().time())

    @asynccontextmanager
    async def limit(self) -> AsyncGenerator[None]:
        """End the block at the deadline.

        Raises:
            DeadlineExceeded: it was ended.
        """
        try:
            async with asyncio.timeout_at(None if self.timeout_s is None else self.began_s + self.timeout_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"The request was not finished within its {self.timeout_s:g} s; allow it more."
            ) from error
