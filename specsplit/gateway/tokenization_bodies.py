"""The bodies of /tokenize and /detokenize, in vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from specsplit.core.ports import TemplateValue
from specsplit.gateway.field_types import TemplateVariables
from specsplit.gateway.schemas import Body, Messages, check_ending, not_supported


class TokenizeBody(Body):
    """The body of /tokenize: a prompt, or messages and variables for the chat template."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "return_token_strs": (False,),
        "add_special_tokens": (True, False),  # one of them, see below
        "add_generation_prompt": (True, False),  # see `check_ending`
        "tools": ([],),
        **dict.fromkeys(("chat_template", "mm_processor_kwargs"), ()),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict[str, TemplateValue])

    @classmethod
    def refuse_unsupported(cls, value: dict[str, Any]) -> None:
        """Refuse and drop as for every body; vLLM adds special tokens to a prompt, not to what a chat template made."""
        is_prompt = value.get("messages") is None
        if value.get("add_special_tokens", is_prompt) is not is_prompt:
            raise not_supported("add_special_tokens")
        check_ending(value)
        super().refuse_unsupported(value)

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have either prompt or messages")
        if self.prompt is not None and self.chat_template_kwargs:
            raise ValueError("has chat_template_kwargs, which are for messages: a prompt has no chat template")
        if self.prompt is not None and self.continue_final_message:
            raise ValueError("has continue_final_message, which is for messages: a prompt has none")
        return self


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
