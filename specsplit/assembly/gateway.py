"""The gateway over its workers: those that the settings name, or processes that are started here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from specsplit import __version__
from specsplit.assembly.current_models import current_models
from specsplit.assembly.generation_settings import no_draft_note
from specsplit.assembly.links import remote_workers
from specsplit.assembly.supervision import local_processes
from specsplit.assembly.worker_links import WorkerLinks, worker_links
from specsplit.assembly.workers import Workers
from specsplit.core.defaults import RETRY_S, Mode
from specsplit.core.errors import InvalidSettings
from specsplit.core.sections import GatewaySettings, OrchestratorSettings
from specsplit.core.settings import Settings
from specsplit.core.types import Note
from specsplit.gateway.app import Gateway, create_app, create_health_app, create_lmtp_app
from specsplit.gateway.audit_metrics import AuditMetrics
from specsplit.gateway.keys import required_keys
from specsplit.gateway.lmtp.message_log import message_log
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.quotas import GatewayQuotas
from specsplit.gateway.server import HttpServer, serving_http
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.rpc.credentials import Security, open_security
from specsplit.rpc.metrics_port import metrics_port
from specsplit.rpc.transport import parse_address

_REMOTE_RETRY_S = 5.0
"""Time for a target elsewhere that is lost; one that the gateway restarts itself gets RETRY_S."""


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that answers."""

    server: HttpServer
    gateway: Gateway
    lmtp: HttpServer | None = None
    """The port of LMTP alone, if there is one."""
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    """Addresses of the ports for probes and for Prometheus, as far as there are some."""

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def model_names(self) -> list[str]:
        return [model.name for model in self.gateway.models.ready]

    async def drain(self, grace_s: float) -> int:
        """Take no new request, give those under way `grace_s` seconds to end, then end them; return how many."""
        self.gateway.is_draining = True
        servers = [self.server] if self.lmtp is None else [self.server, self.lmtp]
        return sum(await asyncio.gather(*(server.drain(grace_s) for server in servers)))


@asynccontextmanager
async def serving_gateway(
    settings: Settings, worker_arguments: Sequence[str] = (), note: Note | None = None
) -> AsyncGenerator[RunningGateway]:
    """Serve HTTP for the length of the block, over workers elsewhere or started with `worker_arguments`.

    Raises:
        InvalidSettings: it cannot listen there, or not without keys; or names of workers that do not fit together.
        WorkerFailed: a worker started here ended before it served.
        LinkError, ModelError: a target elsewhere cannot be reached, or its tokenizer not be read.
    """
    chosen = settings.gateway
    host, port = parse_address(chosen.http, listening=True)
    lmtp_at = None if chosen.lmtp is None else parse_address(chosen.lmtp, listening=True)
    keys = required_keys(chosen)
    if keys is not None:
        keys.warn_if_empty()
    async with AsyncExitStack() as stack:
        log = stack.enter_context(message_log(chosen.log_messages, shows_prompts=chosen.log_prompts))
        models = await stack.enter_async_context(serving_models(settings, worker_arguments, note))
        names = [model.name for model in models.served]
        metrics = Metrics(AuditMetrics(models), names, has_vllm_names=chosen.metrics_compat == "vllm")
        gateway = Gateway(
            models=models,
            version=__version__,
            keys=keys,
            max_body_bytes=chosen.max_body_mib << 20,
            detail=chosen.per_request_spec_decode_metrics,
            message_log=log,
            metrics=metrics,
            quotas=GatewayQuotas(
                chosen.caller_requests,
                chosen.caller_tokens_per_second,
                refused=lambda limit: metrics.over_limit.labels(limit).inc(),
            ),
        )
        on_cut = metrics.ends.cut.inc
        http = serving_http(create_app(gateway), host, port, on_cut=on_cut)
        server = await stack.enter_async_context(http)
        lmtp = None
        if lmtp_at is not None:
            lmtp = await stack.enter_async_context(
                serving_http(create_lmtp_app(gateway, "/"), *lmtp_at, "--lmtp", on_cut)
            )
        yield RunningGateway(server, gateway, lmtp, await _side_ports(stack, chosen, gateway))


async def _side_ports(stack: AsyncExitStack, settings: GatewaySettings, gateway: Gateway) -> dict[str, str]:
    """Open the ports for probes and for Prometheus that the settings name, until `stack` closes; they need no key."""
    beside: dict[str, str] = {}
    if settings.health is not None:
        at = parse_address(settings.health, listening=True)
        probed = await stack.enter_async_context(serving_http(create_health_app(gateway), *at, "--health"))
        beside["health"] = probed.address
    if settings.metrics is not None:
        beside["metrics"] = await stack.enter_async_context(metrics_port(settings.metrics, gateway.metrics.page))
    return beside


@asynccontextmanager
async def serving_models(
    settings: Settings, worker_arguments: Sequence[str] = (), note: Note | None = None
) -> AsyncGenerator[ModelTable]:
    """Have the models there for the length of the block, over workers elsewhere or started with `worker_arguments`.

    Raises:
        InvalidSettings: names of workers that do not fit together, or nobody to audit with.
        WorkerFailed: a worker started here ended before it served.
        LinkError, ModelError: a target elsewhere cannot be reached, or its tokenizer not be read.
    """
    chosen, links = settings.gateway, worker_links(settings)
    security = open_security(chosen, "gateway")
    for address in filter(None, (address for link in links for address in (*link.targets, link.draft))):
        security.check_dial(address)  # before a draft is loaded here for minutes
    if note is not None and (lack := no_draft_note(settings)) is not None:
        note(lack)
    async with AsyncExitStack() as stack:
        started = await stack.enter_async_context(local_processes(settings, worker_arguments, note))
        if started.target is not None:
            links = [WorkerLinks(None, (started.target,), started.draft or settings.draft_address)]
        elif started.draft is not None:
            links = [replace(link, draft=started.draft) for link in links]
        if len(links) > 1 and settings.orchestrator.auditor is not None:
            raise InvalidSettings("--auditor recomputes one model's rounds, and there are several; serve them apart.")
        here = frozenset(filter(None, (started.target, started.draft)))
        security = replace(security, plaintext_at=here)
        default_retry_s = _REMOTE_RETRY_S if started.target is None else RETRY_S
        retry_s = default_retry_s if chosen.retry is None else chosen.retry
        connects = [partial(_connected, settings, link, retry_s, security, note) for link in links]
        yield await stack.enter_async_context(current_models(connects))


@asynccontextmanager
async def _connected(
    settings: Settings, links: WorkerLinks, retry_s: float, security: Security, note: Note | None
) -> AsyncGenerator[ServedModel]:
    """Connect to one model's workers for the length of the block."""
    first, *others = links.targets
    target = settings.target.model_copy(update={"address": first})
    draft = settings.draft.model_copy(update={"address": links.draft})
    # Who names more patience for a lost target has it at the start as well, when a target elsewhere may still load.
    # The timeout is for requests, so it does not end the start.
    longest_s = max(settings.orchestrator.retry, retry_s)
    patience = settings.orchestrator.model_copy(update={"retry": longest_s, "timeout": None})
    placed = settings.model_copy(update={"target": target, "draft": draft, "orchestrator": patience})
    reach = remote_workers(placed, note, replicas=others, waits_when_full=False, security=security)
    async with reach as workers:
        orchestrate = partial(_orchestrator, workers, settings.orchestrator.model_copy(update={"retry": retry_s}))
        identity = await orchestrate(None).connect()
        yield ServedModel(
            name=links.name or settings.target.served_name or identity.model,
            identity=identity,
            tokenizer=workers.tokenizer,
            verifier=workers.verifier,
            orchestrator=orchestrate,
        )


def _orchestrator(workers: Workers, settings: OrchestratorSettings, mode: Mode | None) -> Orchestrator:
    """Return the orchestrator of `mode`, or of the settings' own."""
    return workers.orchestrator(settings if mode is None else settings.model_copy(update={"mode": mode}))
