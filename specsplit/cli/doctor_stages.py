"""The doctor's checks of stages that the settings name: they answer, with this release, and the clocks agree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from specsplit.cli.doctor_checks import Check
from specsplit.cli.doctor_services import clock_check, unreachable, version_check
from specsplit.core.errors import SpecSplitError, WorkerUnreachable
from specsplit.core.settings import Settings
from specsplit.engine import event_loop
from specsplit.rpc.credentials import Security, open_security
from specsplit.stages.wire.peer import StagePeer


def check_stages(settings: Settings) -> list[Check]:
    """Ping the stages and spares of the settings' target; a check fails for each that does not answer."""
    security = open_security(settings.orchestrator, "orchestrator")
    found = event_loop.run(_ping_all((*settings.target.stages, *settings.target.spares), security))
    return [check for checks in found for check in checks]


async def _ping_all(addresses: Sequence[str], security: Security) -> list[list[Check]]:
    return await asyncio.gather(*(_ping(address, security) for address in addresses))


async def _ping(address: str, security: Security) -> list[Check]:
    name = f"stage {address}"
    try:
        peer = StagePeer(address, security)
        try:
            # The first ping pays for connecting, so that the second one tells the clock.
            await peer.ping()
            found = await peer.ping()
        finally:
            await peer.aclose()
    except WorkerUnreachable as error:
        return [Check(name, False, str(await unreachable(error, address, "stage", security)))]
    except SpecSplitError as error:
        return [Check(name, False, str(error))]
    identity = found.identity
    layers = f"layers {identity.start}:{identity.end} of {identity.model}, {identity.dtype}, context {identity.context}"
    version = version_check(name, found.version, identity.protocol_version)
    return [Check(name, True, layers), version, clock_check(name, found.clock_skew_ms)]
