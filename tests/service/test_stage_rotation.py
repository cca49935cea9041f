"""A chain over the rotation of its target's certificate: the connections from before it end, and nothing hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from specsplit.rpc.credentials import Security
from tests.support.processes import SILENT_S
from tests.support.remote_chains import opened_over, served
from tests.support.rounds import plain_text
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, shards, truth


async def test_a_chain_is_made_anew_once_connections_from_before_a_rotation_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, model, security = await asyncio.to_thread(truth), shards("stages"), Security()
    open_channel, channels = Security.open_channel, list[grpc.aio.Channel]()

    def opened(self: Security, *link: Any) -> grpc.aio.Channel:
        channel = open_channel(self, *link)
        if self is security:
            channels.append(channel)
        return channel

    monkeypatch.setattr(Security, "open_channel", opened)
    async with served(model.stages) as hosts:
        addresses = [host.address for host in hosts]
        async with opened_over(model, hosts, [], addresses, [], security=security) as chain:
            assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            before = list(channels)
            assert before
            monkeypatch.setattr(Security, "version", lambda *_: 1)
            for channel in before:
                await channel.close()  # as seven days after the rotation
            async with asyncio.timeout(SILENT_S):
                assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text
            assert len(channels) == 2 * len(before)
