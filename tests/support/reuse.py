"""Sessions that begin as others did: a target with three slots, and what its answers cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specsplit.core.types import Proposal, SamplingParams, Verdict
from specsplit.model.loader import LoadedModel, load_model
from specsplit.target.engine import TargetEngine
from tests.support.model_zoo import FAMILIES, save_model
from tests.support.rounds import params_of, script

MAX_SESSIONS = 3
HOT = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.5, repetition_penalty=1.1)
_folders = TemporaryDirectory()
_keys = count(1)


def new_key(letter: str = "s") -> str:
    """Return the key of a session that is not there yet."""
    return f"{letter}{next(_keys)}"


@cache
def folder(family: str) -> Path:
    """Return the files of a family's model."""
    return save_model(Path(_folders.name) / family, FAMILIES[family](), seed=5)


@cache
def load(family: str = "llama", dtype: str = "fp32", role: Any = "target", *, copy: int = 0) -> LoadedModel:
    """Return a model with slots of its own for every `copy`."""
    options: Any = {"dtype": dtype, "max_sessions": MAX_SESSIONS, "context": 200, "record": False}
    return load_model(str(folder(family)), role=role, threads=1, **options)


@dataclass
class Told:
    """An answer, and what it cost."""

    ids: list[int]
    """Prompt and answer."""
    num_forwarded: int
    num_reused: int


async def answer(
    target: TargetEngine, prompt: Sequence[int], length: int = 4, *, caller: str = "", sampling: SamplingParams = HOT
) -> Told:
    """Answer by one verify a token; whatever happens, end the session."""
    key, ids, told = new_key(), list(prompt), Told([], 0, 0)
    params = replace(params_of(sampling, len(prompt)), caller=caller)
    try:
        for number in range(1, length + 1):
            turn = script(params, ids, len(ids) - 1 if number > 1 else 0, number, key)
            verdict: Verdict = await target.verify(turn, Proposal(1, len(ids) - 1))
            ids.append(verdict.bonus_token)
            told.num_forwarded += verdict.timings.num_tokens
            told.num_reused += verdict.num_reused
    finally:
        await target.close(key)
    target.check_integrity()
    return replace(told, ids=ids)


class Served:
    """A target for the length of a block."""

    def __init__(self, among: Any = "caller", **how: Any) -> None:
        self._model, self._among = load(**how), among

    async def __aenter__(self) -> TargetEngine:
        self._target = TargetEngine(self._model)
        self._target.reuse_prefixes(self._among)
        return self._target

    async def __aexit__(self, *raised: object) -> None:
        await self._target.aclose()
