"""A bare gRPC exchange: as many bytes as a round moves, to another process and back, with nothing done to them.

What a round on loopback costs beside its forwards is compared with it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import grpc.aio

from benchmarks.statistics import median

_METHOD = "/Bare/Exchange"
_REPEATS = 50
_PROGRAM = ("-m", "benchmarks.peers.bare_exchange")


async def _serve() -> None:
    """Answer each message, which begins with the number of bytes that are wanted back."""

    async def exchange(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield bytes(int.from_bytes(request[:4]))

    handler = grpc.stream_stream_rpc_method_handler(exchange, bytes, bytes)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", {"Exchange": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def exchange_s(links: Sequence[tuple[int, int]]) -> float:
    """Return the median seconds of one exchange after the other, each of (bytes there, bytes back) with its process."""
    async with AsyncExitStack() as stack:
        # The processes are started before anything of gRPC runs here: it does not like to be forked.
        calls = [await _open(stack, port) for port in [_start(stack) for _ in links]]
        times: list[float] = []
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            for call, (there, back) in zip(calls, links, strict=True):
                await call.write(back.to_bytes(4) + bytes(max(0, there - 4)))
                assert len(await call.read()) == back, "the process answers as many bytes as it was asked for"
            times.append(time.perf_counter() - start_s)
    return median(times[_REPEATS // 5 :])


def _start(stack: AsyncExitStack) -> int:
    """Start a process that answers, and return its port."""
    process = subprocess.Popen([sys.executable, *_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.enter_context(process)
    stack.callback(process.terminate)
    assert process.stdout is not None
    return int(process.stdout.readline())


async def _open(stack: AsyncExitStack, port: int) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    call = channel.stream_stream(_METHOD, bytes, bytes)()
    stack.callback(call.cancel)
    return call


if __name__ == "__main__":
    asyncio.run(_serve())
