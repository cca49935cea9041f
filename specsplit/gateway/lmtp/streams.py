"""The items of one stream of LMTP: an answer's tokens, or the scores of given ones. Knows no client and no frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from specsplit.core.errors import InvalidRequest, Overloaded
from specsplit.core.types import FinishReason, SamplingParams, Scores, TokenLogProb
from specsplit.gateway.generation import admitted
from specsplit.gateway.lmtp import messages
from specsplit.gateway.lmtp.messages import Generate, Item, Score
from specsplit.gateway.metrics import Metrics
from specsplit.gateway.models import ServedModel
from specsplit.gateway.quotas import Answering
from specsplit.limits import SMALL_BYTES
from specsplit.orchestrator.context_limit import context_exceeded
from specsplit.orchestrator.request import Chunk, Request
from specsplit.orchestrator.text import ByteDetokenizer, Detokenizer, detokenizer_of

T = TypeVar("T")
TellFull = Callable[[], None]
"""Called if the worker's queue is full, and the stream has to come again."""
_SCORES_PER_FRAME = 1000
"""Items of one frame: the real client closes the connection at a frame of 4 MiB."""
_FEW_BIASES = SMALL_BYTES // 16
"""Biases that are checked at once; in a frame each has some 16 characters."""


class _Texts:
    """The text that each token of a stream completes; the texts join to that of the answer."""

    def __init__(self, detokenizer: Detokenizer | ByteDetokenizer) -> None:
        self._detokenizer = detokenizer

    def push(self, token_id: int, *, is_text: bool, is_last: bool) -> str:
        """Return the text that is complete with this token; an end of sequence `is_text` of nobody."""
        text = self._detokenizer.push(token_id) if is_text else ""
        return text + self._detokenizer.flush() if is_last else text


def _pause(tell_full: TellFull) -> Callable[[Overloaded], Awaitable[None]]:
    """Return what waits as long as a full worker says: the real client knows no way to ask again."""

    async def pause(error: Overloaded) -> None:
        tell_full()
        await asyncio.sleep(error.retry_after_s)

    return pause


async def generate(
    model: ServedModel, asked: Generate, caller: str, metrics: Metrics, tell_full: TellFull, answering: Answering
) -> AsyncGenerator[list[Item]]:
    """Yield the items of each round; iterate inside `contextlib.aclosing`, whose end frees the slots.

    Raises:
        InvalidRequest: a value is out of range, or the answer ends before the item to go on from.
    """
    prompt, is_text = asked.prompt, isinstance(asked.prompt, str)
    if isinstance(prompt, str):
        prompt = await _encoded(partial(model.encode, prompt), tell_full, answering)
    ids = tuple(prompt)
    request = Request(
        prompt_ids=ids,
        max_new_tokens=asked.max_tokens,
        sampling=await _sampling(asked, model.identity.vocab_size),
        seed=asked.seed,
        ignore_eos=asked.ignore_eos,
        logprobs=1 if asked.top_logprobs is None else asked.top_logprobs,
        caller=caller,
        request_id=f"lmtp-{asked.stream_id}",
    )
    texts = _Texts(detokenizer_of(model.tokenizer, ids)) if is_text else None
    answer = _AnswerItems(asked.stream_id, texts, asked.x_resume_from)
    orchestrator = model.orchestrator(None)

    async def answer_once() -> AsyncGenerator[Chunk]:
        with answering(len(ids)) as spend:
            async with aclosing(orchestrator.stream(request)) as chunks:
                async for chunk in chunks:
                    spend(len(chunk.token_ids))
                    yield chunk
                    if chunk.result is not None:
                        return

    with metrics.following(model.name, [len(ids)]) as (followed,):
        async with aclosing(admitted(answer_once, _pause(tell_full))) as chunks:
            async for chunk in chunks:
                followed.add(chunk)
                if items := answer.items(chunk):
                    yield items
    if answer.num_tokens <= asked.x_resume_from:
        raise InvalidRequest(
            f"The answer has {answer.num_tokens} tokens, so nothing is left from x_resume_from {asked.x_resume_from}."
        )


async def _sampling(asked: Generate | Score, vocab_size: int) -> SamplingParams:
    """Return how tokens are picked; many biases are checked on a thread, so that no other answer stands still."""
    if len(asked.logit_bias or ()) <= _FEW_BIASES:
        return asked.sampling(vocab_size)
    return await asyncio.to_thread(asked.sampling, vocab_size)


class _AnswerItems:
    """Makes the items of an answer, chunk by chunk; those before `first` are counted only."""

    def __init__(self, stream_id: int, texts: _Texts | None, first: int) -> None:
        self.num_tokens = 0
        self._stream_id, self._texts, self._first = stream_id, texts, first

    def items(self, chunk: Chunk) -> list[Item]:
        """Return the items of a chunk's tokens."""
        last = len(chunk.token_ids) - 1
        made: list[Item] = []
        for index, (token, found) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
            reason = chunk.finish_reason if index == last else None
            item = messages.token_item(self._stream_id, token, found, reason)
            item["top_logprobs"] = messages.top_logprobs(token, found)
            if self._texts is not None:
                item["text"] = self._texts.push(token, is_text=reason != "stop", is_last=reason is not None)
            # Items that the client has are made all the same: their texts may hold the first half of a character.
            if self.num_tokens >= self._first:
                made.append(item)
            self.num_tokens += 1
        return made


async def score(
    model: ServedModel, asked: Score, caller: str, tell_full: TellFull, answering: Answering
) -> AsyncGenerator[list[Item]]:
    """Yield the items of the scored tokens.

    Raises:
        InvalidRequest: nothing to score, a text beside ids, an id that the model lacks, or a bias out of range.
    """
    scored_ids = partial(_scored_ids, model, asked)
    is_text = isinstance(asked.scored, str)
    prompt, scored = await (_encoded(scored_ids, tell_full, answering) if is_text else scored_ids())
    if len(prompt) + len(scored) > model.identity.context:
        raise context_exceeded(len(prompt) + len(scored), model.identity)
    vocab_size = model.identity.vocab_size
    if max([*prompt, *scored]) >= vocab_size:  # the target does not see a first token
        raise InvalidRequest(f"SCORE: there is a token id outside the vocabulary of {vocab_size}.")
    texts: _Texts | None = None
    if is_text:
        # All of the prompt, not a token as context: a character of `scored` may begin in the prompt's last one.
        detokenizer = detokenizer_of(model.tokenizer)
        detokenizer.push_all(prompt)
        texts = _Texts(detokenizer)
    tokens = tuple(scored)
    values: list[TokenLogProb] = []
    if not prompt:  # nothing is known of a first token
        prompt, scored, values = scored[:1], scored[1:], [TokenLogProb(0.0)]
    biases, orchestrator = (await _sampling(asked, vocab_size)).logit_bias, model.orchestrator(None)

    async def ask() -> AsyncGenerator[Scores]:
        with answering(len(prompt) + len(scored)):
            yield await orchestrator.score(prompt, scored, biases, caller=caller)

    if scored:
        async with aclosing(admitted(ask, _pause(tell_full))) as found:
            values += [token async for scores in found for token in scores.tokens]
    last = len(values) - 1
    items: list[Item] = []
    for index, (token, value) in enumerate(zip(tokens, values, strict=True)):
        reason: FinishReason | None = "stop" if index == last else None
        item = messages.token_item(asked.stream_id, token, value, reason)
        if texts is not None:
            item["text"] = texts.push(token, is_text=True, is_last=index == last)
        items.append(item)
    for start in range(0, len(items), _SCORES_PER_FRAME):
        yield items[start : start + _SCORES_PER_FRAME]


async def _encoded(encode: Callable[[], Awaitable[T]], tell_full: TellFull, answering: Answering) -> T:
    """Return what `encode` makes of a text, which counts as a request under way; beyond a limit it waits."""

    async def encode_once() -> AsyncGenerator[T]:
        with answering(0):
            yield await encode()

    async with aclosing(admitted(encode_once, _pause(tell_full))) as encoded:
        return await anext(encoded)


async def _scored_ids(model: ServedModel, asked: Score) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of what is scored behind it.

    Texts are encoded together: a word that goes on over the boundary has other tokens than its two halves.
    """
    prompt, scored = asked.prompt, asked.scored
    if isinstance(scored, str):
        if not isinstance(prompt, str):
            if prompt:
                raise InvalidRequest("SCORE: prompt and scored must both be texts, or both be token ids.")
            prompt = ""
        # [ids of the prompt alone | the rest]: the cut that lm-eval makes, too. Where a token reaches over the end of
        # the prompt, the whole token counts as the prompt's.
        ids = await model.encode(prompt + scored)
        num_prompt = len(await model.encode(prompt)) if prompt else 0
        if len(ids) <= num_prompt:
            raise InvalidRequest("SCORE: scored adds no token to the prompt.")
        return ids[:num_prompt], ids[num_prompt:]
    if isinstance(prompt, str):
        if prompt:
            raise InvalidRequest("SCORE: prompt and scored must both be texts, or both be token ids.")
        prompt = []
    return prompt, scored
