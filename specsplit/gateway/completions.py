"""/v1/completions: prompts as they are, continued; with `echo`, and log-probabilities of the prompt on request."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import TokenLogProb
from specsplit.gateway.answers import Opening, Part
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.logprobs import TextOffsets, TokenEntry, completion_logprobs
from specsplit.gateway.long_answers import slices
from specsplit.gateway.models import ServedModel
from specsplit.gateway.schemas import RANDOM_SEED, CompletionBody, Generation
from specsplit.orchestrator.request import Request


async def prompt_ids(model: ServedModel, body: CompletionBody, deadline: Deadline) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt.

    Raises:
        InvalidRequest: a prompt of ids has one that the model lacks; an echo asks the tokenizer before the target.
        DeadlineExceeded: it took longer.
    """
    vocab_size = model.identity.vocab_size
    for prompt in body.prompt:
        if not isinstance(prompt, str) and not all(0 <= token_id < vocab_size for token_id in prompt):
            raise InvalidRequest(f"The prompt has a token id outside the vocabulary of {vocab_size}.", param="prompt")
    return [
        tuple(await model.encode(prompt, deadline) if isinstance(prompt, str) else prompt) for prompt in body.prompt
    ]


def make_requests(
    body: Generation,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    logprobs: int | None,
    caller: str,
    deadline: Deadline,
) -> list[Request]:
    """Return a request for each of `n` choices of each prompt.

    Raises:
        InvalidRequest: a value is out of range.
    """
    sampling = body.sampling()
    # The choices of one prompt have one seed, as in OpenAI's API: the choice is part of the noise's key. A prompt that
    # comes twice without one has two, since it asks for two samples.
    is_random = body.seed in (None, RANDOM_SEED)
    seeds = [secrets.randbits(64) if is_random else (body.seed or 0) % (1 << 64) for _ in prompts]
    optional: dict[str, Any] = {} if body.priority is None else {"priority": body.priority}
    return [
        Request(
            prompt_ids=ids,
            max_new_tokens=max_tokens,
            sampling=sampling,
            seed=seed,
            choice=choice,
            stop=body.stop,
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            timeout_s=deadline.timeout_s,
            began_s=deadline.began_s,
            logprobs=logprobs,
            caller=caller,
            **optional,
        )
        for ids, seed in zip(prompts, seeds, strict=True)
        for choice in range(body.n or 1)
    ]


@dataclass(slots=True)
class CompletionFormat:
    """Texts, in OpenAI's oldest form."""

    model: ServedModel
    body: CompletionBody
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    _scoring: dict[tuple[tuple[int, ...], str], asyncio.Task[list[TokenEntry]]] = field(
        default_factory=dict[tuple[tuple[int, ...], str], asyncio.Task[list[TokenEntry]]]
    )
    """Entries by ids and text: another text with the same ids has its tokens at other places."""

    async def opening(self, number: int, request: Request) -> Opening | None:
        """Return the prompt if it is to be echoed; the same one is scored once, and cancelling ends that for all."""
        if not self.body.echo:
            return None
        prompt, ids = self.body.prompt[number], request.prompt_ids
        # On a thread: a megabyte of ids takes a tenth of a second.
        text = prompt if isinstance(prompt, str) else await asyncio.to_thread(self.model.tokenizer.decode, ids)
        if self.body.logprobs is None:
            return text, []
        if (ids, text) not in self._scoring:
            self._scoring[ids, text] = asyncio.create_task(self._prompt_entries(request, text))
        return text, await self._scoring[ids, text]

    async def _prompt_entries(self, request: Request, text: str) -> list[TokenEntry]:
        """Return the log-probabilities of a prompt's tokens; nothing is known of the first."""
        found, ids = list[TokenLogProb | None]([None]), request.prompt_ids
        if len(ids) > 1:
            orchestrator = self.model.orchestrator(self.body.speculative.mode)
            found += (await orchestrator.score_prompt(request, keeps_rows=self.body.max_tokens != 0)).tokens
        offsets, entries = TextOffsets(self.model.tokenizer, text=text), list[TokenEntry]()
        for some_ids, some in zip(slices(ids), slices(found), strict=True):
            entries += offsets.entries(some_ids, some)
            await asyncio.sleep(0)
        return entries

    def whole(self, part: Part) -> dict[str, Any]:
        return self.delta(part)

    def delta(self, part: Part) -> dict[str, Any]:
        has_logprobs = self.body.logprobs is not None
        logprobs = completion_logprobs(self.model.tokenizer, part.entries) if has_logprobs else None
        return {"index": part.index, "text": part.text, "logprobs": logprobs, "finish_reason": part.finish_reason}
