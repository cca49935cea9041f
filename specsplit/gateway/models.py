"""The models that the gateway serves: by name, with what a request needs of each, and whether it is ready now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from specsplit.core.defaults import Mode
from specsplit.core.errors import SpecSplitError
from specsplit.core.ports import ChatMessage, Tokenizer, Variables
from specsplit.core.types import Identity
from specsplit.gateway.deadline import Deadline
from specsplit.gateway.errors import ApiError
from specsplit.model.sent_tokenizer import is_long
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.replicas import Replicas, Target

T = TypeVar("T", str, Sequence[ChatMessage])
_PING_S = 1.0
"""Period of pings, and the time for an answer."""
_CHANGED_PINGS = 3
"""Pings in a row that have to tell of another model before it is believed to stay."""


@dataclass(slots=True, weakref_slot=True)
class ServedModel:
    """One model: its target, perhaps with a draft."""

    name: str
    identity: Identity
    """The target's, as it was when it last answered a ping."""
    tokenizer: Tokenizer
    verifier: Target
    orchestrator: Callable[[Mode | None], Orchestrator]
    """Returns the orchestrator of a mode; None is the mode of the settings."""
    is_ready: bool = True
    """Whether the target answered the last ping."""
    created: int = field(default_factory=lambda: int(time.time()))

    _encoding: Mapping[bool, asyncio.Lock] = field(
        default_factory=lambda: {False: asyncio.Lock(), True: asyncio.Lock()}
    )
    """Held while a thread encodes, one for short and one for long texts: short ones do not wait for long ones."""

    @property
    def replicas(self) -> dict[str, int] | None:
        """How many replicas of the target are ready, and how many there are; None for a single target."""
        verifier = self.verifier
        return (
            {"ready": verifier.num_ready, "of": sum(not member.is_auditor for member in verifier.members)}
            if isinstance(verifier, Replicas)
            else None
        )

    async def encode(self, text: str, deadline: Deadline | None = None) -> list[int]:
        """Return the ids of `text`; a long one does not hold up the answers to others.

        Raises:
            DeadlineExceeded: it took longer.
            ModelDamaged: the tokenizer fails on it.
        """
        return await self._on_thread(self.tokenizer.encode, text, deadline)

    async def encode_messages(
        self,
        messages: Sequence[ChatMessage],
        deadline: Deadline | None = None,
        variables: Variables | None = None,
        *,
        continues: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation, in the same way; raises as `encode` does.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses these messages, or does not read a variable.
        """
        encode = partial(self.tokenizer.encode_messages, variables=variables, continues=continues)
        return await self._on_thread(encode, messages, deadline)

    async def _on_thread(self, encode: Callable[[T], list[int]], text: T, deadline: Deadline | None) -> list[int]:
        lock = self._encoding[is_long(text)]
        async with nullcontext() if deadline is None else deadline.limit():
            await lock.acquire()
            # A thread cannot be ended: whoever gives up leaves the tokenizer to it until it is done.
            encoding = asyncio.ensure_future(asyncio.to_thread(encode, text))
            encoding.add_done_callback(lambda _: lock.release())
            # Its error is for whoever waits for it; without anybody there asyncio would print it.
            encoding.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await asyncio.shield(encoding)

    async def warm(self) -> None:
        """Have the chat template ready before the first conversation needs it."""
        with suppress(SpecSplitError):
            await self.encode_messages([{"role": "user", "content": "Hi"}])

    async def watch(self) -> Identity:
        """Keep `is_ready` true to the target until it has become another model, and return who that is.

        While a rollout has the old and the new one behind one address, pings may find them in turn; so _CHANGED_PINGS
        in a row have to find another one. Several replicas have become another model once none serves this one.
        """
        num_changed = 0
        while True:
            await asyncio.sleep(_PING_S)
            other = await self._look()
            num_changed = num_changed + 1 if other is not None else 0
            if other is not None and num_changed == _CHANGED_PINGS:
                return other

    async def _look(self) -> Identity | None:
        """Ping the target once, and return who it is if it is another model."""
        try:
            async with asyncio.timeout(_PING_S):
                identity = await self.verifier.ping()
        except (SpecSplitError, TimeoutError):
            self.is_ready = False
            return self.verifier.successor if isinstance(self.verifier, Replicas) else None
        self.is_ready = _files(identity) == _files(self.identity)
        if not self.is_ready:
            return identity
        self.identity = identity  # its context may be another one since a restart
        return None


def _files(identity: Identity) -> tuple[str, ...]:
    """Return the hashes that tell a model and its tokenizer from others."""
    return identity.vocab_hash, identity.weights_hash, identity.tokenizer_hash


class ModelTable:
    """All models of a gateway."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    @property
    def replicas(self) -> dict[str, dict[str, int]]:
        """The replicas of each model that has some."""
        return {name: found for name, model in self._models.items() if (found := model.replicas) is not None}

    @property
    def served(self) -> list[ServedModel]:
        return list(self._models.values())

    @property
    def ready(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.is_ready]

    @property
    def are_all_ready(self) -> bool:
        return len(self.ready) == len(self._models)

    def replace(self, old: ServedModel, new: ServedModel) -> None:
        """Serve `new` in the place of `old`, under its own name, which no other model has."""
        models = [new if model is old else model for model in self.served]
        self._models = {model.name: model for model in models}

    def find(self, name: str | None) -> ServedModel:
        """Return the model of that name; a request that names none means the only one.

        Raises:
            ApiError: there is no such model, or a choice between several.
        """
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name not in self._models:
            wanted = f"There is no model {name!r}" if name is not None else "The request names no model"
            names = ", ".join(sorted(self._models))
            status = 404 if name is not None else 400
            raise ApiError(status, f"{wanted}; this server has {names}.", param="model", code="model_not_found")
        return self._models[name]
