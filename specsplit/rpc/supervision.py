"""Tasks of a serving process beside its calls: freeing idle sessions, retrying a failed device, health checks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from specsplit.rpc.server import Server

LOOK_S = 1.0
"""Period at which a server looks whether its device is well."""
PATIENCE_S = 60.0
"""A device that fails for longer than this, whatever was tried, does not recover by itself."""
_log = logging.getLogger(__name__)


class Device(Protocol):
    """The health of what computes, as every engine reports it."""

    @property
    def is_well(self) -> bool: ...

    @property
    def is_alive(self) -> bool: ...


class SupervisedEngine(Device, Protocol):
    """An engine with sessions to free and a device to try."""

    async def sweep(self) -> object: ...

    async def check_device(self) -> object: ...


async def sweep_sessions(engine: SupervisedEngine, period_s: float) -> None:
    """Free idle sessions once a period, for ever."""
    while True:
        await asyncio.sleep(period_s)
        try:
            await engine.sweep()
        except Exception:  # noqa: BLE001 - whatever it was, the next sweep shall come
            _log.exception("freeing idle sessions failed")


async def retry_device(engine: SupervisedEngine) -> None:
    """Run a forward of our own on a device that failed: nobody sends work to a server that is not ready."""
    while True:
        await asyncio.sleep(LOOK_S)
        # The engine itself has counted a failure, so its error says nothing new here.
        with contextlib.suppress(Exception):
            await engine.check_device()


async def watch_service(device: Device, server: Server, service: str) -> None:
    """Tell health checks of a service beside the first one whether it can be used, for ever."""
    while True:
        server.tell_service(service, is_ready=device.is_well)
        await asyncio.sleep(LOOK_S)


async def watch_device(device: Device, server: Server) -> None:
    """Tell health checks whether the device of the first service is well, for ever."""
    loop = asyncio.get_running_loop()
    well_s, was_well = loop.time(), True
    while True:
        # The properties are read without waiting for the device, which may hang.
        is_well, now_s = device.is_well, loop.time()
        if is_well:
            well_s = now_s
        if is_well != was_well:
            was_well = is_well
            _log.warning(
                "the device %s", "computes again" if is_well else "is not well: forwards fail, or it has ended"
            )
        is_live = device.is_alive and now_s - well_s < PATIENCE_S
        server.tell_health(is_ready=is_well, is_live=is_live)
        await asyncio.sleep(LOOK_S)
