"""A TCP proxy that is a bad network: latency, jitter, bandwidth, cuts, silence, refusals, flipped bits."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.proxy import Proxy


@dataclass(frozen=True, slots=True)
class Conditions:
    """The treatment of the bytes of one direction; it may be exchanged while they flow."""

    latency_s: float = 0.0
    """One way: a round trip takes twice as long."""
    jitter_s: float = 0.0
    """Added to the latency of each piece, uniformly from 0; pieces never overtake each other, as TCP's do not."""
    bytes_per_s: float | None = None
    corruption: float = 0.0
    """The chance that one byte of a piece is flipped."""
    is_black_hole: bool = False
    """Nothing arrives any more and nobody is told; what was swallowed stays lost, so the connection cannot go on."""

    def __post_init__(self) -> None:
        numbers = (self.latency_s, self.jitter_s, self.corruption, self.bytes_per_s or 0.0)
        if min(numbers) < 0 or self.corruption > 1 or self.bytes_per_s == 0:
            raise ValueError(f"conditions must not be negative, nor a chance above 1: {self}")


class BadNetwork(Proxy):
    """A proxy under conditions. The same seed gives the same jitter and corruption for the same pieces."""

    def __init__(self, target: str, conditions: Conditions | None = None, *, seed: int = 0) -> None:
        super().__init__(target)
        self.conditions = conditions or Conditions()
        self._rng = random.Random(seed)

    def set(self, **changes: Any) -> None:
        """Exchange some of the conditions, for connections that exist as well."""
        self.conditions = replace(self.conditions, **changes)

    async def open(self) -> None:
        """Accept connections, after `refuse` on the same port again."""
        await self.__aenter__()

    async def refuse(self) -> None:
        """Cut what there is and refuse new connections until `open`."""
        await self.__aexit__()

    def carried(self, data: bytes, due_s: float) -> tuple[bytes, float] | None:
        now = self.conditions
        if now.is_black_hole:
            return None
        delay_s = now.latency_s + (self._rng.uniform(0, now.jitter_s) if now.jitter_s else 0.0)
        due_s = max(due_s, asyncio.get_running_loop().time() + delay_s)
        if now.bytes_per_s is not None:
            due_s += len(data) / now.bytes_per_s
        return self._corrupted(data), due_s

    def _corrupted(self, data: bytes) -> bytes:
        if not self.conditions.corruption or self._rng.random() >= self.conditions.corruption:
            return data
        spoilt = bytearray(data)
        spoilt[self._rng.randrange(len(spoilt))] ^= 1 << self._rng.randrange(8)
        return bytes(spoilt)
