"""The tokenizer that a worker sent: nothing of its files is trusted, so what they say is done within limits.

Text becomes ids in a LimitedProcess. Only ids become text here, by decoders that take no longer than the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specsplit.core.errors import ModelDamaged
from specsplit.core.ports import ChatMessage, Variables
from specsplit.core.types import TokenizerFiles
from specsplit.limits import SMALL_BYTES, TOKENIZER_CALL_S, TOKENIZER_LOAD_S
from specsplit.model.limited_process import LimitedProcess, OverLimit, Refused, reason_of
from specsplit.model.tokenizer import TransformersTokenizer
from specsplit.model.tokenizer_cache import store_tokenizer

_MESSAGE = 32
"""Characters that a message counts for beside its content. Chosen: an empty one takes as long as so many."""


class SentTokenizer(TransformersTokenizer):
    """A tokenizer whose work runs within limits; close it at the end.

    Two threads may use it at a time if one of them has a long text, which has a process of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], process: LimitedProcess) -> None:
        super().__init__(tokenizer, eos_ids)
        if self._backend is None:
            raise ModelDamaged("it is none of the tokenizers library: save it with a tokenizer.json")
        text = self._backend.to_str()
        _check_decoder(json.loads(text).get("decoder"))
        controls = self._controls()
        use = {"tokenizer": text, "control_texts": controls.texts, "control_ids": sorted(controls.ids)}
        process.set_up({"call": "use_tokenizer", **use, "template": self._template_input()}, TOKENIZER_LOAD_S)
        self._process, self._process_of_long = process, process.another()
        if self.token_bytes is None:
            self._lead = self.encode("a")[-1:]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens included.

        Raises:
            ModelDamaged: the tokenizer fails on it, or needs more time or memory than it may.
        """
        try:
            return cast("list[int]", self._process_for(text).call({"call": "encode", "text": text}))
        except (Refused, OverLimit) as error:
            raise ModelDamaged(f"The target's tokenizer fails on this text: {error}.") from error

    def _call(self, request: Mapping[str, Any]) -> Any:
        return self._process.call(request)

    def _encode_chat(
        self, messages: Sequence[ChatMessage], variables: Variables, own_texts: Collection[str], continues: bool
    ) -> list[int]:
        given = {"messages": messages, "variables": variables, "own_texts": list(own_texts), "continues": continues}
        return cast("list[int]", self._process_for(messages).call({"call": "encode_messages", **given}))

    def _process_for(self, prompt: str | Sequence[ChatMessage]) -> LimitedProcess:
        return self._process_of_long if is_long(prompt) else self._process

    def close(self) -> None:
        """End its processes; calls under way fail with a ResourceError."""
        self._process.close()
        self._process_of_long.close()


def is_long(prompt: str | Sequence[ChatMessage]) -> bool:
    """Return whether a text or conversation takes so long to encode that others should not wait for it."""
    if isinstance(prompt, str):
        return len(prompt) > SMALL_BYTES
    return sum(len(message["content"]) + _MESSAGE for message in prompt) > SMALL_BYTES


def tokenizer_from_files(files: TokenizerFiles, folder: Path, limit_s: float = TOKENIZER_CALL_S) -> SentTokenizer:
    """Return the tokenizer that a worker sent; its files stay in `folder`, a folder of its own.

    Without files, it reads those that an earlier call left in `folder`. Code from a repository is never run. A text
    takes no more processor time than `limit_s`, and what its length allows it.

    Raises:
        ModelDamaged: a name that leads elsewhere, other files than `files.hash` says, or no readable tokenizer.
        ResourceError: the folder cannot be written, or no process started.
    """
    store_tokenizer(files, folder)
    process = LimitedProcess(limit_s)
    try:
        # Read within limits first: what cannot be read there is not tried here.
        if not (folder / "tokenizer.json").is_file():  # transformers would convert the other files, without limits
            raise ModelDamaged("it has no tokenizer.json, which a target of this release would send")
        process.call({"call": "check", "file": str(folder / "tokenizer.json")}, TOKENIZER_LOAD_S)
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True, mistral_format=False
        )
        return SentTokenizer(tokenizer, files.eos_ids, process)
    except BaseException as error:
        process.close()
        # Over a bad file, transformers raises whatever it likes, and a panic of the tokenizers library is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelDamaged(f"The tokenizer that the target sent cannot be read ({reason_of(error)}).") from error


def _check_decoder(decoder: Any) -> None:
    """Refuse decoders that search with expressions or lengthen texts: ids become text without limits.

    Raises:
        ModelDamaged: such a decoder.
    """
    waiting: list[Any] = [decoder]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        waiting += each.get("decoders", ())
        pattern: Any = each.get("pattern") if each.get("type") == "Replace" else None
        if pattern is None:
            continue
        if "String" not in pattern or len(each.get("content", "")) > len(pattern["String"]):
            raise ModelDamaged("its decoder replaces texts by longer ones or by expressions, which is not allowed")
