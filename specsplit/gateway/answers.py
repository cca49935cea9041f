"""The answers to one HTTP request, whole or as events: what completions and chat completions have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from specsplit.gateway.generation import MAX_AT_ONCE, IndexedChunk, chunks_of
from specsplit.gateway.logprobs import TextOffsets, TokenEntry
from specsplit.gateway.long_answers import slices
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ServedModel
from specsplit.gateway.quotas import Answering, Spend
from specsplit.gateway.schemas import Generation
from specsplit.gateway.sse import Event
from specsplit.gateway.statistics import Detail, SpeculationRecord, trace_of
from specsplit.orchestrator.request import Chunk, Request

Opening = tuple[str, list[TokenEntry]]
"""The text that an answer begins with, and its tokens."""


class Format(Protocol):
    """The form of one kind of answer."""

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    async def opening(self, number: int, request: Request) -> Opening | None:
        """Return text and tokens before the first generated ones to a prompt; None if the first event says nothing.

        `request` is the first one of the prompt.
        """
        ...

    def whole(self, part: Part) -> dict[str, Any]:
        """Return a finished choice."""
        ...

    def delta(self, part: Part) -> dict[str, Any]:
        """Return a part of a choice."""
        ...


@dataclass(slots=True)
class Part:
    """A part of one answer, or all of it."""

    index: int
    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list[TokenEntry])
    """Its tokens, if the request asked for log-probabilities."""
    finish_reason: str | None = None
    is_opening: bool = False

    def extend(self, text: str, entries: Sequence[TokenEntry], finish_reason: str | None) -> None:
        self.text += text
        self.entries += entries
        self.finish_reason = finish_reason


@dataclass(slots=True, kw_only=True)
class Answers:
    """Everything about the answers to one HTTP request; one for each of `requests`."""

    id: str
    model: ServedModel
    body: Generation
    requests: Sequence[Request]
    num_prompt_tokens: int
    format: Format
    metrics: Metrics
    detail: Detail
    answering: Answering
    """Counts the request as one of its caller's."""
    is_prompt_only: bool = False
    """Whether nothing is to be generated."""
    is_scored: bool = False
    """Whether the prompts are echoed with log-probabilities, which computes all of their rows."""
    spend: Spend = lambda count: None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    exactness_reason: str = ""
    """Why a text that was begun with the promise of bits lost it; empty if none did."""
    record: SpeculationRecord = field(default_factory=SpeculationRecord)
    offsets: dict[int, TextOffsets] = field(default_factory=dict[int, TextOffsets])
    """The places of the tokens of each answer that has begun."""
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """Return all answers when all have ended.

        Raises:
            Overloaded: the caller has as much as one may have.
        """
        with self.answering(self.num_prompt_tokens) as self.spend:
            return await self._whole()

    async def _whole(self) -> dict[str, Any]:
        parts = [Part(index) for index in range(len(self.requests))]
        traces: list[list[dict[str, Any]]] = [[] for _ in self.requests]
        for part, opening in zip(parts, await self._openings(), strict=True):
            if opening is not None:
                part.extend(*opening, "length")
        async with aclosing(self._chunks()) as chunks:
            async for index, chunk in chunks:
                parts[index].extend(chunk.text, self._entries(index, chunk), chunk.finish_reason)
                if self.body.speculative.trace:
                    traces[index].append(trace_of(chunk, self.model.tokenizer))
        choices = [await self._choice(part) for part in parts]
        if self.body.speculative.trace:
            for choice, trace in zip(choices, traces, strict=True):
                choice["speculative"] = trace
        return self._message(self.format.whole_object, choices, usage=self._usage(), **self._statistics())

    async def _choice(self, part: Part) -> dict[str, Any]:
        """Return a finished choice, whose log-probabilities are made a slice at a time."""
        first, *others = slices(part.entries)
        choice = self.format.whole(replace(part, entries=list(first)))
        for entries in others:
            await asyncio.sleep(0)
            more = self.format.whole(Part(part.index, entries=list(entries)))["logprobs"]
            for name, values in more.items():
                if isinstance(values, list):
                    choice["logprobs"][name] += values
        return choice

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the answers as they come; iterate inside `contextlib.aclosing`.

        Raises:
            Overloaded: before the first, if the caller has as much as one may have.
        """
        with self.answering(self.num_prompt_tokens) as self.spend:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event

    async def _events(self) -> AsyncGenerator[Event]:
        options = self.body.stream_options
        ends_with_usage = options is not None and options.include_usage
        always_usage = options is not None and options.continuous_usage_stats
        num_left = len(self.requests)
        async with aclosing(self._parts()) as parts:
            async for part, trace in parts:
                choice = self.format.delta(part)
                if trace is not None:
                    choice["speculative"] = trace
                # As OpenAI documents it: a stream that ends with the usage has null in its place before.
                usage: dict[str, Any] = {"usage": None} if ends_with_usage else {}
                extra: dict[str, Any] = {"usage": self._usage()} if always_usage else usage
                num_left -= part.finish_reason is not None
                if num_left == 0 and not ends_with_usage:
                    extra |= self._statistics()
                yield self._message(self.format.chunk_object, [choice], **extra)
        if ends_with_usage:
            yield self._message(self.format.chunk_object, [], usage=self._usage(), **self._statistics())

    async def _parts(self) -> AsyncGenerator[tuple[Part, dict[str, Any] | None]]:
        """Yield what there is to tell: parts with text, tokens that were asked for, and ends."""
        # Before an answer has a slot, which it would hold while the scores of an echo wait for one.
        openings = await self._openings()
        unopened = set(range(len(self.requests)))
        traces, wants_tokens = self.body.speculative.trace, self.requests[0].logprobs is not None
        async with aclosing(self._chunks()) as chunks:
            async for index, chunk in chunks:
                if index in unopened:
                    unopened.remove(index)
                    if (opening := openings[index]) is not None:
                        for part in _opening_parts(index, *opening):
                            yield part, None
                entries = self._entries(index, chunk)
                if not (chunk.text or chunk.finish_reason or traces or (wants_tokens and entries)):
                    continue  # a character or a possible stop string is not complete yet
                part = Part(index, chunk.text, entries, chunk.finish_reason)
                yield part, trace_of(chunk, self.model.tokenizer) if traces else None
        for index in sorted(unopened):  # only the prompt was asked for
            *first, last = _opening_parts(index, *(openings[index] or ("", [])))
            for part in first:
                yield part, None
            yield replace(last, finish_reason="length", is_opening=False), None

    async def _openings(self) -> list[Opening | None]:
        """Return what each answer begins with, behind which its tokens come; those of several prompts are made at once.

        Raises what `Format.opening` raises; the first error ends all of them.
        """
        places, num_choices = asyncio.Semaphore(MAX_AT_ONCE), self.body.n or 1

        async def make(number: int) -> Opening | None:
            async with places:
                opening = await self.format.opening(number, self.requests[number * num_choices])
            if opening is not None and opening[1]:
                self.is_scored = True
                self.spend(0)  # its prompt was scored, whatever becomes of the answer
            return opening

        tasks = [asyncio.create_task(make(number)) for number in range(len(self.requests) // num_choices)]
        try:
            made = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        openings = [opening for opening in made for _ in range(num_choices)]
        for index, (request, opening) in enumerate(zip(self.requests, openings, strict=True)):
            start = len(opening[0]) if opening is not None else 0
            self.offsets[index] = TextOffsets(self.model.tokenizer, start, before=request.prompt_ids)
        return openings

    async def _chunks(self) -> AsyncGenerator[IndexedChunk]:
        """Yield the chunks of all answers, each of which is counted."""
        if self.is_prompt_only:
            return
        orchestrator = self.model.orchestrator(self.body.speculative.mode)
        nums_prompt_tokens = [len(request.prompt_ids) for request in self.requests]
        with self.metrics.following(self.model.name, nums_prompt_tokens) as followed:
            async with aclosing(chunks_of(orchestrator, self.requests)) as chunks:
                async for index, chunk in chunks:
                    followed[index].add(chunk)
                    self._count(index, chunk)
                    yield index, chunk

    def _count(self, index: int, chunk: Chunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        self.spend(len(chunk.token_ids))
        if chunk.result is not None:
            # A prompt counts once, as in its usage, and not if the rows are those of its own echo.
            if not self.requests[index].choice and not self.is_scored:
                self.num_cached_tokens += chunk.result.num_reused_tokens
            self.exactness_reason = self.exactness_reason or chunk.result.exactness_reason
        self.record.add(chunk.facts)

    def _entries(self, index: int, chunk: Chunk) -> list[TokenEntry]:
        return self.offsets[index].entries(chunk.token_ids, chunk.logprobs) if chunk.logprobs else []

    def _message(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}
        return {**head, "choices": choices, **extra}

    def _usage(self) -> dict[str, Any]:
        total = self.num_prompt_tokens + self.num_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def _statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = {"exactness_reason": self.exactness_reason} if self.exactness_reason else {}
        if self.detail != "none":
            found["metrics"] = {"speculative_decoding": self.record.to_dict(self.detail)}
        return found


def _opening_parts(index: int, text: str, entries: Sequence[TokenEntry]) -> Iterator[Part]:
    """Yield what an answer begins with; a long prompt's tokens come in several parts, each with its text."""
    begin, parts = 0, list(slices(entries))
    for number, some in enumerate(parts, 1):
        end = parts[number][0].offset if number < len(parts) else len(text)
        yield Part(index, text[begin:end], list(some), is_opening=number == 1)
        begin = end
