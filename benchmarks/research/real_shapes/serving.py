"""What the child processes serve: our modes over one loaded pair, and transformers' ways over one pair of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

import torch

from benchmarks.peers import transformers_ways
from benchmarks.peers.bare_forward import BareForward
from benchmarks.peers.ours import InProcess, OnLoop
from benchmarks.peers.transformers_ways import NUM_CONSTANT_TOKENS, TransformersSystem
from benchmarks.research.real_shapes.parts import Parts, timed_parts
from benchmarks.settings import Pair, ServedMode
from benchmarks.systems import Task
from specsplit.assembly.models import load_models
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import DraftSettings, Settings, TargetSettings, override

OUR_MODES = ("plain", "pingpong", "auto", "lookup", "overlap", "stream")
WHOLE_HEAD = "-whole-head"
"""Behind a mode's name: the draft's head computes all tokens, in a process of its own."""
DRAFTED_WHOLE = tuple(f"{mode}{WHOLE_HEAD}" for mode in OUR_MODES if mode not in ("plain", "lookup"))
BARE = "bare"
_WAYS: dict[str, dict[str, Any]] = {
    "generate": {},
    "assisted": {},
    "assisted-constant": {},
    "prompt-lookup": {"prompt_lookup_num_tokens": NUM_CONSTANT_TOKENS},
}
THEIR_WAYS = tuple(_WAYS)


class OurModes(InProcess):
    """Our modes and the bare forward; also tells the parts of a round and what a process of it holds."""

    def __init__(self, threads: int, names: Sequence[str], pair: Pair, context: int, draft_vocab: str | None) -> None:
        OnLoop.__init__(self)
        loading = {"dtype": pair.dtype, "device": pair.device, "threads": threads, "context": context}
        # The modes share their engines and get the same prompts: each forwards its prompt, as transformers' ways do.
        loading["prefix_reuse"] = "off"
        self._settings = Settings(
            target=TargetSettings.model_validate({"model": pair.target, **loading}),
            draft=DraftSettings.model_validate({"model": pair.draft, "vocab": draft_vocab, **loading}),
            orchestrator=override(OrchestratorSettings(), mode="auto"),
        )
        start_s = time.perf_counter()
        self._models = load_models(self._settings)
        self._load_s = time.perf_counter() - start_s
        served = [(name, name.removesuffix(WHOLE_HEAD)) for name in names if name != BARE]
        self._modes = [ServedMode(name, mode, lookup=mode != "pingpong") for name, mode in served]
        self._has_bare = BARE in names

    def __enter__(self) -> Self:
        super().__enter__()
        if self._has_bare:
            self.systems = [*self.systems, BareForward(BARE, self._models.target.runner)]  # type: ignore[list-item]
        return self

    def load_s(self) -> float:
        """Return the seconds in which both models were loaded, imports aside."""
        return self._load_s

    def parts(self, name: str, task: Task) -> Parts:
        """Return where the time of one generation goes."""
        system = next(each for each in self.systems if each.name == name)
        return timed_parts(system, task, self._models)


class TheirWays:
    """transformers' ways over one target and one draft."""

    def __init__(self, threads: int, ways: Sequence[str], pair: Pair) -> None:
        target = transformers_ways.load_model("target", pair)
        options = {name: dict(_WAYS[name]) for name in ways}
        if "assisted" in options:
            options["assisted"]["assistant_model"] = transformers_ways.load_model("draft", pair)
        if "assisted-constant" in options:
            options["assisted-constant"] = transformers_ways.WAYS["assisted-constant"](pair)
        self.systems = [TransformersSystem(name, target, threads, chosen) for name, chosen in options.items()]

    def __enter__(self) -> Self:
        torch.set_grad_enabled(False)
        return self

    def __exit__(self, *raised: object) -> None:
        pass
