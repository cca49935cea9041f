"""The stages of a target as processes of this machine: started, watched, restarted, and ended with their target.

A stage that ends is started again; one that hangs (it answers no pings, or never ends its step) is killed first.
Whatever ends the target ends its stages too. Knows no chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from specsplit.core.defaults import ENV_CONFIG, ENV_PREFIX, STEP_TIMEOUT_S
from specsplit.core.errors import DeadlineExceeded, SpecSplitError, WorkerUnreachable
from specsplit.core.sections import TargetSettings
from specsplit.core.types import Note
from specsplit.model.cores import num_cores
from specsplit.rpc.hang import LOOK_S, SILENT, ProcessorWaits, wait_hung
from specsplit.rpc.local_process import LocalProcess, running
from specsplit.stages.identity import ExpectedChain
from specsplit.stages.memory import stage_share
from specsplit.stages.ranges import even_ranges
from specsplit.stages.wire.admission import check_alive
from specsplit.stages.wire.peer import StagePeer

_SETTINGS = (f"{ENV_PREFIX}STAGE_", ENV_CONFIG)
"""Variables with settings of stages; they are for stages that users start."""


def local_stages(
    layers: Sequence[str],
    arguments: Sequence[str],
    note: Note | None = None,
    *,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> AbstractAsyncContextManager[list[str]]:
    """Run a stage process for each of `layers` (A:B) for the length of the block, and give their addresses.

    `arguments` are those of `specsplit stage` that all of them get, and no settings of this machine; `note` shows every
    stage that serves. A stage that computes one step for longer than `step_timeout_s` hangs.

    Raises:
        WorkerFailed: one ended before it served, and what it said last; or it said something else than that it serves.
        InvalidSettings: one ended so since its settings are wrong.
        ResourceError: no process can be started.
    """
    wait = partial(_wait_hung, step_timeout_s=step_timeout_s)
    return running(
        [
            LocalProcess(f"Stage {index} (layers {of})", ("stage", "--layers", of, *arguments), note, wait, _SETTINGS)
            for index, of in enumerate(layers)
        ]
    )


def stage_arguments(expected: ExpectedChain, settings: TargetSettings) -> list[str]:
    """Return the options of stages started here; what they leave out has its default."""
    # The first one has the most layers; all get the same options.
    num_stages = settings.local_stages or 1
    most_layers = len(even_ranges(expected.num_layers, num_stages)[0])
    given: dict[str, object] = {
        "model": settings.model,
        "ends": expected.ends,
        "dtype": expected.dtype,
        "device": settings.device,
        # With every core for each, stages wait at every operator for threads that others keep from running.
        "threads": settings.threads or max(1, num_cores() // num_stages),
        "context": expected.context,
        "sessions": expected.num_slots,
        "kv-memory": stage_share(settings.kv_memory, most_layers, expected.num_layers),
        "drain": settings.drain,
        "log-format": settings.log_format,
        "log-level": settings.log_level,
    }
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return words if settings.record else [*words, "--no-record"]


async def _wait_hung(address: str, pid: int, *, step_timeout_s: float) -> str:
    """Return why the stage at `address` hangs, once it does."""
    peer = StagePeer(address)
    try:
        return await wait_hung(partial(_look, peer, step_timeout_s), ProcessorWaits(pid).were_long)
    finally:
        await peer.aclose()


async def _look(peer: StagePeer, step_timeout_s: float) -> str | None:
    """Return what is wrong with the process, None if nothing is."""
    try:
        ping = await peer.ping(LOOK_S)
    except (WorkerUnreachable, DeadlineExceeded):
        await peer.renew()
        return SILENT
    except SpecSplitError:
        # An error is an answer: the process lives, and health is the business of its coordinator.
        return None
    try:
        check_alive(peer, ping, step_timeout_s)
    except WorkerUnreachable as error:
        return str(error)
    return None
