"""The answers of a chat come from draft and target, here or elsewhere, or from an OpenAI endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast, get_origin
from urllib.parse import SplitResult, urlsplit

from specsplit.assembly.requests import make_request, request_settings
from specsplit.assembly.workers import Workers
from specsplit.cli import render
from specsplit.cli.chat_turn import Conversation
from specsplit.core.defaults import ENV_API_KEY
from specsplit.core.errors import InvalidSettings, LinkError, WorkerFailed
from specsplit.core.sections import OrchestratorSettings
from specsplit.limits import MAX_TOKENS
from specsplit.orchestrator.request import Piece
from specsplit.rpc.words import clean_name, clean_words

CONNECT_S = 10.0
"""Seconds to reach an endpoint. Chosen: a user in front of a terminal waits no longer."""
_NAMES_THERE = {"max_new_tokens": "max_tokens"}
T = TypeVar("T")


@dataclass(slots=True)
class ChatStats:
    """Counts over all answers of a chat."""

    num_answers: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    last: str = ""
    """The line that ended the last answer."""

    def add(self, num_tokens: int, seconds: float, summary: str) -> None:
        """Count an answer."""
        self.num_answers += 1
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.last = summary

    def to_dict(self) -> dict[str, Any]:
        """Return the counts by what they count."""
        rate = self.num_tokens / self.seconds if self.seconds else 0.0
        counted = "answer" if self.num_answers == 1 else "answers"
        return {counted: self.num_answers, "tokens": self.num_tokens, "tok/s": f"{rate:.1f}"}


class Answers(Protocol):
    """Gives the pieces of an answer as they come."""

    stats: ChatStats
    settings: OrchestratorSettings

    def stream(
        self, conversation: Conversation, text: str, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Sequence[Piece]]:
        """Answer `text` behind the conversation, and count the answer at its end.

        Raises:
            InvalidRequest, InvalidSettings: it cannot be asked for.
            SpecSplitError: it failed.
        """
        ...


@dataclass(slots=True)
class WorkerAnswers:
    """Answers of workers that this process runs or knows."""

    workers: Workers
    settings: OrchestratorSettings
    stats: ChatStats

    async def stream(
        self, conversation: Conversation, text: str, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Sequence[Piece]]:
        """See `Answers`."""
        # Raw text goes on as it is, also where the settings have a chat template applied to texts.
        template = {"chat": False} if conversation.is_raw else {}
        chosen = request_settings(self.settings, {**parameters, **template})
        prompt = conversation.raw_prompt(text) if conversation.is_raw else conversation.asking(text)
        request = make_request(self.workers.tokenizer, prompt, chosen)
        began_s = time.monotonic()
        async with aclosing(self.workers.orchestrator(chosen).stream(request)) as all_:
            async for chunk in all_:
                yield chunk.pieces
                if chunk.result is not None:
                    summary = render.summary(chunk.result)
                    self.stats.add(len(chunk.result.token_ids), time.monotonic() - began_s, summary)


def checked_key(key: str | None) -> str | None:
    """Return a key of the environment without the blanks around it, which come with `$(cat FILE)`; None if it is empty.

    Raises:
        InvalidSettings: no header of HTTP may hold it.
    """
    key = (key or "").strip()
    # Beyond Latin-1 http.client has no bytes for it.
    if not key.isprintable() or not all(ord(character) < 256 for character in key):
        raise InvalidSettings(f"{ENV_API_KEY} has characters that no HTTP header may hold; set it again.")
    return key or None


@dataclass(slots=True)
class EndpointAnswers:
    """Answers of a server that speaks OpenAI's HTTP, such as `specsplit serve`; that one's show what was drafted."""

    url: str
    key: str | None
    settings: OrchestratorSettings
    chosen: frozenset[str]
    """Parameters that the user has set somewhere; the endpoint has its own defaults for all others."""
    stats: ChatStats
    _model: dict[str, Any] = field(default_factory=dict[str, Any])

    def meet(self) -> str:
        """Ask for its models; return the name of the first one, which answers.

        Raises:
            InvalidSettings: the URL is none.
            LinkError, WorkerFailed: it cannot be reached, or serves no model.
        """
        connection = self._connect()
        try:
            try:
                connection.request("GET", f"{self._base}/models", headers=self._headers)
            except OSError:
                raise  # a wrong certificate is a ValueError as well
            except ValueError as error:  # a host or path with letters that have no place there
                raise self._no_url() from error
            listed = _answered(connection.getresponse(), self.url)
            self._model = dict(json.loads(listed.read())["data"][0])
            return clean_name(str(self._model["id"]))
        except (OSError, http.client.HTTPException) as error:
            # Without the number that Python puts before the system's words.
            why = getattr(error, "strerror", None) or str(error)
            raise LinkError(f"The endpoint {self.url} cannot be reached ({clean_words(why)}).") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise WorkerFailed(f"The endpoint {self.url} lists no models as OpenAI's does.") from error
        finally:
            connection.close()

    async def stream(
        self, conversation: Conversation, text: str, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[Sequence[Piece]]:
        """See `Answers`."""
        body = self._body(conversation, text, parameters)
        path = f"{self._base}/{'completions' if conversation.is_raw else 'chat/completions'}"
        events = asyncio.Queue[_Event | Exception | None]()
        loop, began_s, num_tokens = asyncio.get_running_loop(), time.monotonic(), 0
        reader = _EventReader(
            self._connect(), lambda event: loop.is_closed() or loop.call_soon_threadsafe(events.put_nowait, event)
        )
        reader.post(path, body, self._headers)
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                num_tokens = num_tokens if event.num_tokens is None else event.num_tokens
                for pieces in event.answers:
                    yield pieces
        finally:
            reader.leave()
        seconds = time.monotonic() - began_s
        self.stats.add(num_tokens, seconds, f"{num_tokens} tokens | {num_tokens / seconds:.1f} tok/s")

    def _no_url(self) -> InvalidSettings:
        return InvalidSettings(f"--endpoint needs a URL such as http://127.0.0.1:8000, not {self.url}.")

    @property
    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url)
            is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:  # a port that is no number, or half a pair of brackets
            raise self._no_url() from error
        if not is_one:
            raise self._no_url()
        return parts

    @property
    def _base(self) -> str:
        path = self._parts.path.rstrip("/")
        return path if path.endswith("/v1") else f"{path}/v1"

    @property
    def _headers(self) -> dict[str, str]:
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {"Content-Type": "application/json", **key}

    def _connect(self) -> http.client.HTTPConnection:
        parts = self._parts
        assert parts.hostname is not None, "checked where it was split"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        # Without a port http.client would take what follows the last colon of an IPv6 address for one.
        return kind(parts.hostname, parts.port or kind.default_port, timeout=CONNECT_S)

    def _body(self, conversation: Conversation, text: str, parameters: Mapping[str, Any]) -> bytes:
        chosen = request_settings(self.settings, parameters)
        given = {name: getattr(chosen, name) for name in sorted(self.chosen | parameters.keys())}
        asked: dict[str, Any] = {_NAMES_THERE.get(name, name): value for name, value in given.items()}
        asked |= {"model": self._model["id"], "stream": True, "stream_options": {"include_usage": True}}
        if self._model.get("owned_by") == "specsplit":
            asked["speculative"] = {"trace": True}
        prompt = (
            {"prompt": conversation.raw_prompt(text)}
            if conversation.is_raw
            else {"messages": conversation.asking(text)}
        )
        return json.dumps(asked | prompt).encode()


class _Event(NamedTuple):
    """The contents of an event of the server."""

    answers: list[list[Piece]]
    """The pieces of each choice, which say what was drafted if the server tells."""
    num_tokens: int | None
    """Tokens of the answer so far, if it tells."""
    is_last: bool


class _EventReader(threading.Thread):
    """Sends a request and puts its events, then None or what went wrong."""

    def __init__(
        self, connection: http.client.HTTPConnection, put: Callable[[_Event | Exception | None], object]
    ) -> None:
        super().__init__(name="specsplit-endpoint", daemon=True)
        self._connection, self._put = connection, put
        self._where = f"{connection.host}:{connection.port}"
        self._request: tuple[str, bytes, dict[str, str]] | None = None
        self._socket: socket.socket | None = None
        self._has_left = threading.Event()

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Begin."""
        self._request = path, body, dict(headers)
        self.start()

    def leave(self) -> None:
        """End the request, so that the server frees what it holds."""
        self._has_left.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            self._read()
            self._put(None)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            if not self._has_left.is_set():
                self._put(LinkError(f"The endpoint {self._where} broke off ({clean_words(str(error))})."))
        except WorkerFailed as error:
            self._put(error)

    def _read(self) -> None:
        assert self._request is not None, "begun with one"
        path, body, headers = self._request
        self._connection.connect()
        connected = self._socket = self._connection.sock
        assert connected is not None, "connected above"
        connected.settimeout(None)  # a long prompt may wait for its turn
        if self._has_left.is_set():
            return
        self._connection.request("POST", path, body, headers)
        is_whole = False
        for line in _answered(self._connection.getresponse(), self._where):
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""  # the blank may be missing
            is_whole = is_whole or data == b"[DONE]"
            if data.startswith(b"{"):
                event = _read_event(json.loads(data))
                is_whole |= event.is_last
                self._put(event)
        # Without a length of its own an answer that was cut off looks like one that has ended.
        if not is_whole:
            raise http.client.HTTPException("the answer has no end")


def _answered(response: http.client.HTTPResponse, where: str) -> http.client.HTTPResponse:
    """Return the response.

    Raises:
        WorkerFailed: it is an error, whose message this one has.
    """
    if response.status == http.client.OK:
        return response
    said = response.read()
    try:
        raise WorkerFailed(_message(json.loads(said), f"{where} answered {response.status}."))
    except ValueError:
        raise WorkerFailed(f"{where} answered {response.status} {clean_name(response.reason)}.") from None


def _message(answer: Any, otherwise: str) -> str:
    found = answer
    for name in ("error", "message"):
        if isinstance(found, dict):
            found = cast("dict[str, Any]", found).get(name)
    return clean_words(found) if isinstance(found, str) else otherwise


def _read_event(event: Mapping[str, Any]) -> _Event:
    """Return what an event says, whoever wrote it.

    Raises:
        WorkerFailed: it is an error.
        ValueError: one of its fields is not of the type that it has in OpenAI's API.
    """
    if event.get("error") is not None:
        raise WorkerFailed(_message(event, "It failed."))
    choices = [_typed(choice, dict[str, Any], "choices") for choice in _field(event, "choices", list[Any])]
    num_tokens = _field(event, "usage", dict[str, Any]).get("completion_tokens")
    if num_tokens is not None and not 0 <= _typed(num_tokens, int, "completion_tokens") <= MAX_TOKENS:
        raise ValueError("its completion_tokens are no number of tokens")
    is_last = any(choice.get("finish_reason") for choice in choices)
    return _Event([_pieces(choice) for choice in choices], num_tokens, is_last)


def _pieces(choice: Mapping[str, Any]) -> list[Piece]:
    """Return the text of one choice of an event."""
    if choice.get("speculative") is not None:
        pieces = _field(_field(choice, "speculative", dict[str, Any]), "pieces", list[Any])
        typed = [_typed(piece, dict[str, Any], "pieces") for piece in pieces]
        return [(_field(piece, "text", str), _field(piece, "drafted", bool)) for piece in typed]
    return [(_field(choice, "text", str) or _field(_field(choice, "delta", dict[str, Any]), "content", str), False)]


def _field(holder: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a field; one that is missing or null, as others of our fields are there, is empty."""
    value = holder.get(name)
    return kind() if value is None else _typed(value, kind, name)


def _typed(value: Any, kind: type[T], name: str) -> T:
    if type(value) is not (get_origin(kind) or kind):
        raise ValueError(f"its {name} has another type than in OpenAI's API")
    return value
