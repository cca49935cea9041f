"""A chain whose stages are in this process: packets go from one to the next as they are."""

from __future__ import annotations

from collections.abc import Sequence

from specsplit.core.packet import Packet
from specsplit.core.ports import Stage


class LocalChain:
    """Implements StageLink over stages in their order."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    @property
    def is_down(self) -> bool:
        return False

    async def send(self, packet: Packet) -> Packet:
        """Send a packet through the whole chain and return the last stage's answer to it."""
        for stage in self._stages:
            packet = await stage.forward(packet)
        return packet
