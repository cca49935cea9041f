"""/v1/chat/completions: conversations, put into the model's own words by its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specsplit.gateway.answers import Opening, Part
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.logprobs import chat_logprobs
from specsplit.gateway.models import ServedModel
from specsplit.gateway.schemas import ChatBody
from specsplit.orchestrator.request import Request


async def conversation_ids(model: ServedModel, body: ChatBody, deadline: Deadline) -> tuple[int, ...]:
    """Return the token ids of the conversation.

    Raises:
        InvalidRequest: the model has no chat template, or it refuses these messages, or does not read a variable.
        DeadlineExceeded: it took longer.
    """
    messages = [message.for_template() for message in body.messages]
    continues = bool(body.continue_final_message)
    return tuple(await model.encode_messages(messages, deadline, body.template_variables, continues=continues))


@dataclass(slots=True)
class ChatFormat:
    """Messages of the assistant."""

    model: ServedModel
    body: ChatBody
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    async def opening(self, number: int, request: Request) -> Opening | None:
        """Return an empty text: the first event says whose message it is."""
        return "", []

    def whole(self, part: Part) -> dict[str, Any]:
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {**self._common(part), "message": message}

    def delta(self, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if part.is_opening else {}
        if part.text or part.is_opening:
            delta["content"] = part.text
        return {**self._common(part), "delta": delta}

    def _common(self, part: Part) -> dict[str, Any]:
        has_logprobs = self.body.logprobs and not part.is_opening
        logprobs = chat_logprobs(self.model.tokenizer, part.entries) if has_logprobs else None
        return {"index": part.index, "logprobs": logprobs, "finish_reason": part.finish_reason}
