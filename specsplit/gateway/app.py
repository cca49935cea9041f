"""The HTTP application: OpenAI's endpoints, and those of an operator. Knows no sockets and starts nothing."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specsplit.core.errors import SpecSplitError, WorkerUnreachable
from specsplit.gateway.answers import Answers, Format
from specsplit.gateway.body import read_body
from specsplit.gateway.chat import ChatFormat, conversation_ids
from specsplit.gateway.completions import CompletionFormat, make_requests, prompt_ids
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.errors import ApiError, api_error
from specsplit.gateway.hosts import foreign_host
from specsplit.gateway.keys import KeyRing
from specsplit.gateway.lmtp.message_log import MessageLog
from specsplit.gateway.lmtp.session import LmtpServer
from specsplit.gateway.lmtp.websocket import LmtpApp
from specsplit.gateway.long_answers import to_json
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ModelTable, ServedModel
from specsplit.gateway.other_servers import our_path
from specsplit.gateway.page import PAGE_PATHS, page_routes
from specsplit.gateway.quotas import GatewayQuotas
from specsplit.gateway.schemas import Body, ChatBody, CompletionBody, Generation
from specsplit.gateway.sse import Event, EventStream, end_early, error_response, logged, until_disconnect
from specsplit.gateway.statistics import Detail
from specsplit.gateway.tokenization_bodies import DetokenizeBody, TokenizeBody
from specsplit.limits import MAX_BODY_BYTES
from specsplit.orchestrator.request import Request as GenerationRequest
from specsplit.telemetry import spans

_OPEN_PATHS = PAGE_PATHS | {"/health", "/ready"}
"""Paths that need no key: probes have none, and the page asks for one."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(kw_only=True)
class Gateway:
    """The state of the application: what it serves, and how."""

    models: ModelTable
    version: str
    keys: KeyRing | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    detail: Detail = "none"
    is_draining: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    quotas: GatewayQuotas = field(default_factory=GatewayQuotas)
    message_log: MessageLog | None = None
    """The log of LMTP's messages."""


def create_app(gateway: Gateway) -> ASGIApp:
    """Return the application over `gateway`."""
    # A redirect would lead to http:// whatever the client's scheme, and many clients do not follow one of a POST.
    app = FastAPI(title="SpecSplit", version=gateway.version, docs_url=None, redoc_url=None, redirect_slashes=False)
    describe = app.openapi
    app.openapi = lambda: _add_schemas(describe())
    _add_operations(app, gateway)
    _add_generation(app, gateway)
    _add_tokenization(app, gateway)
    app.router.routes += page_routes()

    async def answer_error(request: Request, error: Exception) -> Response:
        return logged(api_error(error), request.scope)

    async def answer_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, allowed = request.scope["path"], (error.headers or {}).get("Allow", "other methods")
        ours = our_path(path, [str(getattr(route, "path", "")) for route in app.routes])
        words = f"here it is {ours}" if ours else "/openapi.json lists what there is, such as /v1/completions"
        said = {404: f"There is no {path} here; {words}.", 405: f"{path} takes {allowed}, not {request.method}."}
        refused = ApiError(
            error.status_code, said.get(error.status_code, str(error.detail)), headers=error.headers or {}
        )
        return error_response(refused)

    async def answer_defect(request: Request, error: Exception) -> Response:
        return logged(api_error(error), request.scope)

    app.add_exception_handler(ApiError, answer_error)
    app.add_exception_handler(SpecSplitError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_defect)
    return _Door(app, gateway)


def create_health_app(gateway: Gateway) -> ASGIApp:
    """Return what answers probes alone."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _add_probes(app, gateway)
    return app


def create_lmtp_app(gateway: Gateway, path: str) -> ASGIApp:
    """Return what answers LMTP's clients at `path` alone."""
    server = LmtpServer(gateway.models, gateway.metrics, gateway.message_log, gateway.quotas)
    return LmtpApp(server, gateway.keys, path, is_open=lambda: not gateway.is_draining)


class _Door:
    """Lets in whoever has a key, and gives every request an id that its answer names."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._keys, self._lmtp = app, gateway.keys, create_lmtp_app(gateway, "/lmtp")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            with spans.span("http", spans.extract(_headers(scope))):
                await self._lmtp(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        request_id = request.headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        scope["state"] = {"request_id": request_id}
        # Probes and scrapes come every few seconds; whoever wants something posts it.
        is_traced = scope["method"] == "POST"
        with spans.span("http", spans.extract(_headers(scope)), request=request_id) if is_traced else nullcontext():
            await self._let_in(request, receive, send)

    async def _let_in(self, request: Request, receive: Receive, send: Send) -> None:
        scope, request_id = request.scope, request.state.request_id

        sent: Message | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)
            sent = message

        caller, refused = "", None
        # The path that is routed: that of `request.url` is made with the Host header, which a client chooses.
        if self._keys is None:
            refused = foreign_host(scope)
        elif scope["path"] not in _OPEN_PATHS:
            found = self._keys.caller(request.headers.get("authorization", ""))
            if found is None:
                refused = ApiError(401, "The API key is missing or not known.", code="invalid_api_key")
            caller = found or ""
        if refused is not None:
            await logged(refused, scope)(scope, receive, send_with_id)
            return
        scope["state"]["caller"] = caller
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the time to drain is over
            if not await end_early(sent, scope, receive, send_with_id):
                raise


def _headers(scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield the headers of a request, in lower case."""
    return ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])


def _add_probes(app: FastAPI, gateway: Gateway) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        is_ready = gateway.models.are_all_ready and not gateway.is_draining
        models, replicas = [model.name for model in gateway.models.ready], gateway.models.replicas
        known = {"models": models, "replicas": replicas} if replicas else {"models": models}
        return JSONResponse(known, 200 if is_ready else 503)


def _add_operations(app: FastAPI, gateway: Gateway) -> None:
    _add_probes(app, gateway)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": gateway.version}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(model) for model in gateway.models.ready]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        found = gateway.models.find(name)
        if not found.is_ready:
            raise api_error(WorkerUnreachable(f"The target of {found.name} does not answer now; ask again."))
        return _card(found)


def _quota_of(request: Request) -> str:
    """Return whose quota a request uses up: that of its key, or of its host where nobody needs one."""
    return request.state.caller or (request.client.host if request.client is not None else "")


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "specsplit",
        "root": model.identity.model,
        "max_model_len": model.identity.context,
    }


def _add_generation(app: FastAPI, gateway: Gateway) -> None:
    def answers(
        request: Request, model: ServedModel, body: Generation, requests: list[GenerationRequest], form: Format
    ) -> Answers:
        """Return the answers to `requests`, which has `n` of each prompt in turn.

        Raises:
            InvalidRequest, ContextExceeded: one of them does not fit the model.
        """
        prefix, request_id = "chatcmpl" if isinstance(body, ChatBody) else "cmpl", request.state.request_id
        firsts, is_prompt_only = requests[:: body.n or 1], isinstance(body, CompletionBody) and body.max_tokens == 0
        # Before any work: the target would refuse a wrong prompt when its neighbours have texts, or parts of them.
        if not is_prompt_only or requests[0].logprobs is not None:
            for first in firsts:
                first.check_fits(model.identity, 0 if is_prompt_only else 1)
        return Answers(
            id=f"{prefix}-{request_id}",
            model=model,
            body=body,
            requests=[replace(each, request_id=request_id) for each in requests],
            num_prompt_tokens=sum(len(first.prompt_ids) for first in firsts),
            format=form,
            metrics=gateway.metrics,
            detail=gateway.detail,
            is_prompt_only=is_prompt_only,
            answering=partial(gateway.quotas.answering, _quota_of(request)),
        )

    @app.post("/v1/completions", openapi_extra=_documented(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody, gateway.max_body_bytes)
        model = gateway.models.find(body.model)
        deadline = Deadline.from_now(body.timeout)

        async def prepare() -> Answers:
            with gateway.quotas.answering(_quota_of(request), 0):  # a long prompt takes the tokenizer seconds
                prompts = await prompt_ids(model, body, deadline)
            limit = max(1, body.token_limit)
            requests = make_requests(body, prompts, limit, body.logprobs, request.state.caller, deadline)
            return answers(request, model, body, requests, CompletionFormat(model, body))

        return await _answer(request, body, prepare)

    @app.post("/v1/chat/completions", openapi_extra=_documented(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody, gateway.max_body_bytes)
        model = gateway.models.find(body.model)
        deadline = Deadline.from_now(body.timeout)

        async def prepare() -> Answers:
            with gateway.quotas.answering(_quota_of(request), 0):
                prompt = await conversation_ids(model, body, deadline)
            limit = body.max_completion_tokens or body.max_tokens or model.identity.context
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            requests = make_requests(body, [prompt], limit, logprobs, request.state.caller, deadline)
            return answers(request, model, body, requests, ChatFormat(model, body))

        return await _answer(request, body, prepare)


async def _answer(request: Request, body: Generation, prepare: Callable[[], Awaitable[Answers]]) -> Response:
    """Answer whole, or as a stream, whose client has a word also while `prepare` encodes its prompt."""

    async def events() -> AsyncGenerator[Event]:
        async with aclosing((await prepare()).events()) as prepared:
            async for event in prepared:
                yield event

    async def whole() -> str:
        return await to_json(await (await prepare()).whole())

    if body.stream:
        return EventStream(events())
    return Response(await until_disconnect(request.receive, whole()), media_type="application/json")


def _add_tokenization(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/tokenize", openapi_extra=_documented(TokenizeBody))
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, TokenizeBody, gateway.max_body_bytes)
        model = gateway.models.find(body.model)
        with gateway.quotas.answering(_quota_of(request), 0):
            if body.messages is not None:
                messages = [message.for_template() for message in body.messages]
                continues, variables = bool(body.continue_final_message), body.chat_template_kwargs
                encoding = model.encode_messages(messages, variables=variables, continues=continues)
            else:
                encoding = model.encode(body.prompt or "")
            tokens = await until_disconnect(request.receive, encoding)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": model.identity.context}

    @app.post("/detokenize", openapi_extra=_documented(DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read_body(request, DetokenizeBody, gateway.max_body_bytes)
        model = gateway.models.find(body.model)
        if max(body.tokens, default=0) >= model.identity.vocab_size:
            raise ApiError(
                400, f"tokens has an id outside the vocabulary of {model.identity.vocab_size}.", param="tokens"
            )
        with gateway.quotas.answering(_quota_of(request), 0):
            decoding = asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
            return {"prompt": await until_disconnect(request.receive, decoding)}


def _documented(schema: type[Body]) -> dict[str, Any]:
    """Return what /openapi.json says of an endpoint's body; the body itself is read and checked by `read_body`."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _add_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAPI document with the schemas of all bodies in it."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs", {}), body.__name__: schema}
    return document
