"""The doctor's checks of workers elsewhere: they answer, and fit each other and this process. Loads no model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import specsplit
from specsplit.assembly.worker_links import worker_links
from specsplit.cli.doctor_checks import Check, exactness_check, no_draft_check, revision_checks
from specsplit.core.defaults import Role
from specsplit.core.errors import SpecSplitError, WorkerUnreachable
from specsplit.core.settings import Settings
from specsplit.core.types import Identity
from specsplit.engine import event_loop
from specsplit.model.memory_size import shown_memory
from specsplit.rpc.auth import LinkRole
from specsplit.rpc.clients import PingDetails, RemoteDrafter, RemoteVerifier
from specsplit.rpc.credentials import Security, open_security
from specsplit.rpc.handshake import why_refused
from specsplit.telemetry.statistics import WorkerLoad

_MOST_SKEW_MS = 1000.0
"""Largest difference of clocks at which the spans of several machines can be read together."""


def check_services(settings: Settings, here: Mapping[Role, Identity]) -> list[Check]:
    """Ping the workers that the settings name; a check fails on no answer, another role or another vocabulary.

    `here` are the models that were loaded into this process to work with them.
    """
    addresses: dict[Role, str] = {}
    if settings.target.address is not None:
        addresses["target"] = settings.target.address
    if settings.draft_address is not None:
        addresses["draft"] = settings.draft_address
    return _checks_of(settings, addresses, here, open_security(settings.orchestrator, "orchestrator"))


def check_gateway_workers(settings: Settings) -> list[Check]:
    """Ping the workers that a gateway's settings name, over its links: replicas one by one, each with the draft."""
    security = open_security(settings.gateway, "gateway")
    checks: list[Check] = []
    for link in worker_links(settings):
        for target in link.targets:
            addresses: dict[Role, str] = {"target": target}
            if link.draft is not None:
                addresses["draft"] = link.draft
            checks += _checks_of(settings, addresses, {}, security)
    return list(dict.fromkeys(checks))  # a draft of several replicas is told once


def _checks_of(
    settings: Settings, addresses: Mapping[Role, str], here: Mapping[Role, Identity], security: Security
) -> list[Check]:
    answers = event_loop.run(_ping_all(addresses, security))
    checks: list[Check] = []
    for role, answer in answers.items():
        if isinstance(answer, PingDetails):
            checks += _worker(role, addresses[role], answer)
        else:
            checks.append(Check(role, False, str(answer)))
    found: dict[Role, Identity] = {
        role: answer.identity for role, answer in answers.items() if isinstance(answer, PingDetails)
    }
    if "draft" not in addresses and not settings.has_draft:  # a gateway's draft is in no role's settings
        return [*checks, no_draft_check(settings)]
    return [*checks, *_compatibility({**here, **found})]


async def _ping_all(addresses: Mapping[Role, str], security: Security) -> dict[Role, PingDetails | SpecSplitError]:
    answers = await asyncio.gather(*(_ping(role, address, security) for role, address in addresses.items()))
    return dict(zip(addresses, answers, strict=True))


async def _ping(role: Role, address: str, security: Security) -> PingDetails | SpecSplitError:
    try:
        client = RemoteDrafter if role == "draft" else RemoteVerifier
        worker = client(address, security=security)
        try:
            # The first ping pays for connecting, so that the second one measures the round trip alone.
            await worker.ping()
            return await worker.ping_details()
        finally:
            await worker.aclose()
    except WorkerUnreachable as error:
        return await unreachable(error, address, role, security)
    except SpecSplitError as error:
        return error


async def unreachable(error: WorkerUnreachable, address: str, role: LinkRole, security: Security) -> WorkerUnreachable:
    """Return an error that says why nothing is reached at `address`, if that can be found out."""
    reason = await why_refused(address, role, security)
    said = f"{address} cannot be reached: {reason}; check the address and that the {role} runs."
    return WorkerUnreachable(said) if reason else error


def _worker(role: Role, address: str, found: PingDetails) -> list[Check]:
    identity = found.identity
    detail = (
        f"{address}: {identity.model}: {identity.dtype} on {identity.device}, vocabulary {identity.vocab_size}, "
        f"context {identity.context}, round trip {found.round_trip_ms:.1f} ms"
    )
    load = found.load
    if load.num_slots:
        detail += (
            f", {load.num_sessions} sessions, {load.num_free_slots} of {load.num_slots} slots free, "
            f"{load.num_waiting} waiting"
        )
    if load.num_kv_rows:
        detail += f", KV cache {_kv_cache(load)}"
    return [
        Check(role, True, detail),
        *revision_checks(role, identity),
        exactness_check(role, identity),
        version_check(role, found.version, identity.protocol_version),
        clock_check(role, found.clock_skew_ms),
    ]


def version_check(name: str, version: str, protocol: int) -> Check:
    """Return the line about the release of the process that is called `name`."""
    is_same = version == specsplit.__version__
    detail = f"specsplit {version}, protocol {protocol}"
    if not is_same:
        detail += f"; here it is specsplit {specsplit.__version__}: install the same release on both sides"
    return Check(f"{name} version", True, detail, is_warning=not is_same)


def clock_check(name: str, skew_ms: float) -> Check:
    """Return the line about a clock that is `skew_ms` ahead of the one here."""
    is_close = abs(skew_ms) <= _MOST_SKEW_MS
    detail = f"{abs(skew_ms):.1f} ms {'ahead of' if skew_ms > 0 else 'behind'} the one here"
    if not is_close:
        detail += "; set both by NTP, or spans of the two cannot be read together"
    return Check(f"{name} clock", True, detail, is_warning=not is_close)


def _kv_cache(load: WorkerLoad) -> str:
    """Return how much of its KV cache a worker has free, and whether it had to preempt sessions for it."""
    free, rows, row_bytes = load.num_free_kv_rows, load.num_kv_rows, load.kv_row_bytes
    sizes = f" ({shown_memory(free * row_bytes)} of {shown_memory(rows * row_bytes)})" if row_bytes else ""
    preempted = f", {load.num_preempted} sessions preempted" if load.num_preempted else ""
    return f"{free} of {rows} tokens free{sizes}{preempted}"


def _compatibility(found: Mapping[Role, Identity]) -> list[Check]:
    """Check that the two fit each other, if both were found."""
    large, small = found.get("target"), found.get("draft")
    if large is None or small is None:
        return []
    is_same = large.vocab_hash == small.vocab_hash
    # Hashes of all tokens are compared: with equal sizes, ids may still mean different text.
    vocabulary = (
        "the same for draft and target"
        if is_same
        else f"the draft {small.model} and the target {large.model} have different ones; serve a draft of its family"
    )
    checks = [Check("vocabulary", is_same, vocabulary)]
    if small.model == large.model and small.model_revision != large.model_revision:
        detail = f"draft and target are {large.model}, but not of one revision"
        checks.append(Check("revision", True, detail, is_warning=True))
    is_shorter = small.context < large.context and not small.has_window
    context = f"{large.context} tokens"
    if is_shorter:
        context += f"; the draft's is {small.context}, and beyond it there is lookup alone"
    return [*checks, Check("context", True, context, is_warning=is_shorter)]
