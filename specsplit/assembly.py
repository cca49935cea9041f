"""Settings to objects, in one process: loads the models, starts the engines over them, hands out orchestrators.

The only file that sees engines and orchestrator together. Importing it is cheap: torch comes with `load_models`.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsplit.core.errors import InvalidRequest, MissingExtra, ModelDamaged, VocabularyMismatch
from specsplit.core.ports import Drafter, Tokenizer, Verifier
from specsplit.core.settings import OrchestratorSettings, Settings
from specsplit.core.types import Identity
from specsplit.orchestrator.pipeline import Orchestrator
from specsplit.orchestrator.records import Request, Speculation

if TYPE_CHECKING:
    from specsplit.model.loader import LoadedModel

Progress = Callable[[str, float], None]
"""Called with what is being loaded and the fraction done, from 0 to 1 over all models."""
_WORKER_PACKAGES = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class Models:
    """The loaded models of one process; without a draft it decodes plainly."""

    target: LoadedModel
    draft: LoadedModel | None

    @property
    def degraded(self) -> list[str]:
        """Return a sentence for everything that works less well than it could."""
        reasons = [
            f"The forward of {model.name} could not be recorded, so it runs slower."
            for model in (self.target, self.draft)
            if model is not None and not model.runner.is_recorded
        ]
        if self.draft is not None and self.draft.context < self.target.context:
            reasons.append(
                f"The draft's context of {self.draft.context} tokens is shorter than the target's "
                f"{self.target.context}; beyond it, decoding is plain."
            )
        return reasons

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.target.tokenizer is not None, "load_models refuses a target without one"
        return self.target.tokenizer


@dataclass(frozen=True, slots=True)
class Workers:
    """A target, a draft where there is one, and the tokenizer they share."""

    verifier: Verifier
    drafter: Drafter | None
    tokenizer: Tokenizer

    def orchestrator(self, settings: OrchestratorSettings) -> Orchestrator:
        """Return an orchestrator that runs rounds as `settings` say; many may share the workers."""
        speculation = Speculation(
            mode=settings.mode, nodes=settings.nodes, depth=settings.depth, branching=settings.branching
        )
        drafter = None if settings.mode == "plain" else self.drafter
        return Orchestrator(self.verifier, drafter, self.tokenizer, speculation)


def require_worker_extra() -> None:
    """Import what runs models.

    Raises:
        MissingExtra: torch or one of its companions is not installed.
    """
    try:
        importlib.import_module("specsplit.model.loader")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _WORKER_PACKAGES:
            raise
        raise MissingExtra(f"Running a model here needs {error.name}: pip install 'specsplit[worker]'.") from error


def load_models(settings: Settings, progress: Progress | None = None) -> Models:
    """Load the target, and the draft where the settings name one.

    Raises:
        MissingExtra, ModelError, ResourceError, InvalidRequest: a model cannot be loaded here, and why.
        VocabularyMismatch: the two do not speak the same tokens.
    """
    require_worker_extra()
    from specsplit.model.loader import DEFAULT_NODE_LIMIT, load_model

    report = progress if progress is not None else _ignore
    draft_source = settings.draft_source
    share = 1.0 if draft_source is None else 0.5
    node_limit = max(DEFAULT_NODE_LIMIT, settings.orchestrator.nodes)
    target = load_model(
        settings.target.model,
        role="target",
        dtype=settings.target.dtype,
        device=settings.target.device,
        threads=settings.target.threads,
        context=settings.target.context,
        node_limit=node_limit,
        progress=lambda phase, fraction: report(f"target: {phase}", fraction * share),
    )
    if target.tokenizer is None:
        raise ModelDamaged(f"{target.name} has no tokenizer files; add its tokenizer.json.")
    if draft_source is None:
        return Models(target, None)
    draft = load_model(
        draft_source,
        role="draft",
        dtype=settings.draft.dtype,
        device=settings.draft.device,
        threads=settings.draft.threads,
        context=settings.draft.context,
        default_context=target.context,
        node_limit=node_limit,
        progress=lambda phase, fraction: report(f"draft: {phase}", share + fraction * share),
    )
    if draft.tokenizer is None:
        raise ModelDamaged(f"{draft.name} has no tokenizer files to compare with the target's; add its tokenizer.json.")
    check_vocabularies(target.identity, draft.identity)
    return Models(target, draft)


def _ignore(phase: str, fraction: float) -> None:
    pass


def check_vocabularies(target: Identity, draft: Identity) -> None:
    """Refuse a draft of another vocabulary.

    Raises:
        VocabularyMismatch: naming both models.
    """
    if target.vocab_hash != draft.vocab_hash:
        raise VocabularyMismatch(
            f"The draft {draft.model} and the target {target.model} have different vocabularies; name a draft of the "
            "target's family with --draft-model, or use --mode plain."
        )


@asynccontextmanager
async def running(models: Models) -> AsyncGenerator[Workers]:
    """Run an engine over each model for the length of the block."""
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.device import LoopDevice
    from specsplit.target.engine import TargetEngine

    device = LoopDevice(models.target.threads)  # one for both: they take turns
    target = TargetEngine(models.target, device)
    draft = DraftEngine(models.draft, device) if models.draft is not None else None
    try:
        yield Workers(target, draft, models.tokenizer)
    finally:
        await target.aclose()
        if draft is not None:
            await draft.aclose()
        await device.close()


def check_prompt(prompt: str | Sequence[int]) -> None:
    """Refuse a prompt that no model could take, before one is loaded.

    Raises:
        InvalidRequest: it is empty or holds half characters.
    """
    if not len(prompt):
        raise InvalidRequest("The prompt is empty; give it at least one character.", param="prompt")
    if isinstance(prompt, str) and any("\ud800" <= character <= "\udfff" for character in prompt):
        raise InvalidRequest("The prompt is not valid UTF-8; convert it first.", param="prompt")


def make_request(tokenizer: Tokenizer, prompt: str | Sequence[int], settings: OrchestratorSettings) -> Request:
    """Return the request for `prompt`, a text or token ids; without a seed, 64 random bits are drawn here.

    Raises:
        InvalidRequest: a value is out of range, or the model has no chat template.
    """
    check_prompt(prompt)
    if isinstance(prompt, str):
        prompt_ids = tokenizer.encode_chat(prompt) if settings.chat else tokenizer.encode(prompt)
    else:
        prompt_ids = list(prompt)
    return Request(
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling(),
        seed=secrets.randbits(64) if settings.seed is None else settings.seed,
        stop=settings.stop,
        ignore_eos=settings.ignore_eos,
    )
