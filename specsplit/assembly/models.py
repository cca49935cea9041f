"""Settings to loaded models. Importing it is cheap: torch comes with the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specsplit.assembly.draft_beside import share_device
from specsplit.assembly.links import check_audit
from specsplit.core.defaults import (
    DEFAULT_CONTEXT,
    DEFAULT_DRAFT_CONTEXT,
    DEFAULT_NODE_LIMIT,
    EMBEDDED,
    MOST_SERVED,
    SERVED_SESSIONS,
    Role,
)
from specsplit.core.errors import ModelDamaged, VocabularyMismatch
from specsplit.core.ports import Tokenizer
from specsplit.core.sections import DraftSettings, TargetSettings, WorkerSettings
from specsplit.core.settings import Settings
from specsplit.core.types import Identity
from specsplit.model.extra import check_device, require_worker_extra
from specsplit.model.memory_size import parse_memory
from specsplit.model.source import check_source, public_name
from specsplit.model.vocab_file import parse_draft_vocab
from specsplit.rpc.transport import is_loopback, parse_address

if TYPE_CHECKING:
    from specsplit.model.loader import LoadedModel, LoadOptions

Progress = Callable[[str, float], None]
"""Called with what is being loaded and the fraction done, from 0 to 1 over all models."""


@dataclass(frozen=True, slots=True)
class Models:
    """The loaded models of one process; without a draft there is lookup alone."""

    target: LoadedModel
    draft: LoadedModel | None

    @property
    def degraded(self) -> list[str]:
        """Return a sentence for everything that works less well than it could."""
        reasons = [
            not_recorded(model) for model in (self.target, self.draft) if model is not None and model.lacks_recording
        ]
        if self.draft is not None and (short := short_of_rows(self.target, self.draft)) is not None:
            reasons.append(short)
        if self.draft is not None and self.draft.context < self.target.context and not self.draft.has_window:
            reasons.append(
                f"The draft's context of {self.draft.context} tokens is shorter than the target's "
                f"{self.target.context}, and too short for a window; beyond it, there is lookup alone."
            )
        return reasons

    @property
    def max_sessions(self) -> int:
        """How many requests may run at once: each has a slot of every model."""
        return min(model.max_sessions for model in (self.target, self.draft) if model is not None)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.target.tokenizer is not None, "load_models refuses a target without one"
        return self.target.tokenizer


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """The one loaded model of a process whose target is elsewhere."""

    draft: LoadedModel

    @property
    def degraded(self) -> list[str]:
        """Return a sentence for everything that works less well than it could."""
        return [not_recorded(self.draft)] if self.draft.lacks_recording else []

    @property
    def max_sessions(self) -> int:
        """How many requests may run at once."""
        return self.draft.max_sessions


def short_of_rows(target: LoadedModel, draft: LoadedModel) -> str | None:
    """Return the sentence for a draft with memory for fewer tokens than its target's budget has, else None."""
    cache, wanted = draft.runner.cache, target.runner.cache.row_limit
    rows, is_full = cache.row_limit, cache.row_limit == draft.max_sessions * cache.capacity
    if target.max_sessions * target.runner.cache.capacity == wanted or rows >= wanted or is_full:
        return None
    return (
        f"The draft has KV memory for {rows} tokens of all sessions and the target for {wanted}. Texts beyond that are "
        "computed again there; less --kv-memory for the target leaves it more."
    )


def not_recorded(model: LoadedModel) -> str:
    """Return the sentence for a model whose forward stays in Python though it was to be recorded."""
    return f"The forward of {model.name} could not be recorded, so it runs slower."


def check_models(settings: Settings) -> None:
    """Refuse models of this process that are not here and cannot be fetched, before torch is imported.

    Raises:
        InvalidSettings: a size of memory is none, or the draft's vocabulary is none.
        ModelNotFound, ModelDamaged, ModelUnsupported.
        DeviceUnavailable: torch cannot use the device.
    """
    # Whoever loads the models reads the sizes again; a gateway has workers do that, seconds later.
    parse_memory(settings.target.kv_memory)
    parse_memory(settings.draft.kv_memory)
    if not settings.is_remote:
        check_worker("target", settings.target)
    if settings.draft_source is not None:
        check_worker("draft", settings.draft.model_copy(update={"model": settings.draft_source}))


def load_models(settings: Settings, progress: Progress | None = None, *, max_sessions: int = 1) -> Models:
    """Load the target, and the draft if the settings name one.

    If the settings do not say for how many sessions, it is for up to `max_sessions`, as the memory has room.

    Raises:
        MissingExtra, ModelError, ResourceError, UsageError: a model cannot be loaded here; the message says why.
        VocabularyMismatch: draft and target have different tokens.
    """
    check_models(settings)
    check_audit(settings, 1)
    require_worker_extra()
    from specsplit.model.cores import num_cores
    from specsplit.model.loader import load_model
    from specsplit.model.memory import reserved

    draft_source = settings.draft_source
    share = 1.0 if draft_source is None else 0.5
    target = load_model(
        settings.target.model,
        role="target",
        dtype=settings.target.dtype,
        device=settings.target.device,
        threads=settings.target.threads,
        record=settings.target.record,
        # The draft's thread takes one core where both work at once.
        max_threads=max(1, num_cores() - 1) if settings.runs_side_by_side else None,
        context=settings.target.context,
        max_sessions=settings.target.sessions or max_sessions,
        min_sessions=settings.target.sessions or 1,
        kv_memory=parse_memory(settings.target.kv_memory),
        node_limit=_node_limit(settings.target.device, settings),
        shares_tokenizer=False,
        progress=_part(progress, "target", 0.0, share),
    )
    if target.tokenizer is None:
        raise ModelDamaged(f"{target.name} has no tokenizer files; add its tokenizer.json.")
    if draft_source is None:
        return Models(target, None)
    cache = target.runner.cache
    of_target = target.threads if share_device(settings.target, settings.draft) else None
    fallback: LoadOptions = {
        # In turns they share the target's team: with one each, the two would put each other's threads to sleep.
        "threads": 1 if settings.runs_side_by_side else of_target,
        "default_context": _draft_context(settings.draft.device, target.context),
        "max_sessions": target.max_sessions,
        # A draft beside a target that counts its rows holds as many, if there is memory.
        "kv_rows": cache.row_limit if settings.target.kv_memory is not None else None,
    }
    with reserved(cache.reserved_bytes):
        draft = _load_draft(draft_source, settings, _part(progress, "draft", share, share), fallback)
    check_vocabularies(target.identity, draft.identity)
    return Models(target, draft)


def load_local(
    settings: Settings, progress: Progress | None = None, *, max_sessions: int = 1
) -> Models | LoadedDraft | None:
    """Load the models that the settings place in this process: those of `load_models`, the draft alone, or none.

    Raises what `load_models` raises.
    """
    if not settings.is_remote:
        return load_models(settings, progress, max_sessions=max_sessions)
    source = settings.draft_source
    if source is None:
        return None
    check_models(settings)
    require_worker_extra()
    return LoadedDraft(
        _load_draft(
            source,
            settings,
            _part(progress, "draft", 0.0, 1.0),
            {
                "default_context": _draft_context(settings.draft.device, settings.target.context),
                "max_sessions": max_sessions,
                # There is no other model here that the size could be for.
                "kv_memory": parse_memory(settings.target.kv_memory),
            },
        )
    )


def _load_draft(source: str, settings: Settings, progress: Progress | None, fallback: LoadOptions) -> LoadedModel:
    """Load a draft with the options of `fallback` where the settings name none."""
    from specsplit.model.loader import load_model

    chosen = settings.draft
    options: LoadOptions = {
        **fallback,
        "dtype": chosen.dtype,
        "device": chosen.device,
        "vocab": chosen.vocab,
        "record": chosen.record,
        "shares_tokenizer": False,
        "context": chosen.context,
        "min_sessions": chosen.sessions or 1,
        "node_limit": _node_limit(chosen.device, settings),
    }
    if chosen.threads is not None:
        options["threads"] = chosen.threads
    if chosen.sessions is not None:
        options["max_sessions"] = chosen.sessions
    if chosen.kv_memory is not None:
        options["kv_memory"], options["kv_rows"] = parse_memory(chosen.kv_memory), None
    draft = load_model(source, role="draft", progress=progress, **options)
    # Equal sizes prove nothing: only the tokens themselves, hashed, tell whether the two mean the same by an id.
    if draft.tokenizer is None:
        raise ModelDamaged(f"{draft.name} has no tokenizer files to compare with the target's; add its tokenizer.json.")
    return draft


def load_worker(
    role: Role,
    settings: WorkerSettings,
    progress: Progress | None = None,
    *,
    default_context: int | None = None,
    has_all_cores: bool = False,
    kv_rows: int | None = None,
) -> LoadedModel:
    """Load the model of a worker that serves; without a context a draft goes by its target's, `default_context`.

    `has_all_cores` says that nothing else computes on them, whatever address it listens on. `kv_rows` are those of all
    sessions where the settings name no memory for them.

    Raises:
        MissingExtra, ModelError, ResourceError, InvalidRequest: it cannot be loaded here; the message says why.
    """
    check_worker(role, settings)
    require_worker_extra()
    from specsplit.model.loader import load_model

    source, kv_memory = settings.model or EMBEDDED, parse_memory(settings.kv_memory)
    model = load_model(
        source,
        role=role,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        record=settings.record,
        max_threads=None if has_all_cores else most_threads(settings),
        vocab=settings.vocab if isinstance(settings, DraftSettings) else None,
        context=settings.context,
        default_context=_draft_context(settings.device, default_context) if role == "draft" else DEFAULT_CONTEXT,
        max_sessions=settings.sessions or MOST_SERVED,
        min_sessions=settings.sessions or SERVED_SESSIONS,
        kv_memory=kv_memory,
        kv_rows=kv_rows if kv_memory is None else None,
        shares_tokenizer=role == "target",
        progress=progress,
    )
    if model.tokenizer is None:
        raise ModelDamaged(f"{model.name} has no tokenizer files, which others need; add its tokenizer.json.")
    # From here on clients see the name, and where the files are is no business of theirs.
    return replace(model, name=settings.served_name or public_name(source))


def check_worker(role: Role, settings: WorkerSettings) -> None:
    """Refuse a worker that cannot be loaded, before torch is imported.

    Raises what `check_models` raises.
    """
    check_source(settings.model or EMBEDDED, role)
    check_device(settings.device)
    parse_memory(settings.kv_memory)
    if isinstance(settings, DraftSettings) and settings.vocab is not None:
        parse_draft_vocab(settings.vocab)


def load_worker_pair(
    settings: TargetSettings, draft_settings: DraftSettings, progress: Progress | None = None
) -> tuple[LoadedModel, LoadedModel]:
    """Load a target and the draft that its process serves, too: they take turns, so the draft has the same threads.

    A draft beside a target that counts its rows holds as many, if there is memory.

    Raises what `load_worker` raises, and VocabularyMismatch.
    """
    check_worker("draft", draft_settings)  # a large target takes minutes before it is the draft's turn
    target = load_worker("target", settings, _part(progress, "target", 0.0, 0.5))
    from specsplit.model.memory import reserved

    cache = target.runner.cache
    with reserved(cache.reserved_bytes):
        draft = load_worker(
            "draft",
            draft_settings.model_copy(update={"threads": target.threads}),
            _part(progress, "draft", 0.5, 0.5),
            default_context=target.context,
            kv_rows=cache.row_limit if settings.kv_memory is not None else None,
        )
    check_vocabularies(target.identity, draft.identity)
    return target, draft


def most_threads(settings: WorkerSettings) -> int | None:
    """Return how many threads a worker that measures their number may take; None is as many as there are cores.

    A draft that listens on loopback works for a target on this machine. With every core for both, each waits at every
    operator for threads that the other one keeps from running: `overlap` was four times slower than plain decoding.
    """
    from specsplit.model.cores import num_cores

    is_near = isinstance(settings, DraftSettings) and is_loopback(parse_address(settings.listen, listening=True)[0])
    return max(1, num_cores() // 2) if is_near else None


def _node_limit(device: str, settings: Settings) -> int:
    """Return the rows that slots have behind their context, for the widest tree; on a GPU a larger one is refused.

    The attention of compiled layers has masks for as many, and with another one all layers would be compiled anew.
    """
    asked = settings.orchestrator.nodes or 0
    return max(DEFAULT_NODE_LIMIT, asked) if device == "cpu" else DEFAULT_NODE_LIMIT


def _draft_context(device: str, of_target: int | None) -> int:
    """Return the longest context of a draft for which none is set: its target's, and less where reading takes long."""
    context = of_target or DEFAULT_CONTEXT
    return min(context, DEFAULT_DRAFT_CONTEXT) if device == "cpu" else context


def _part(progress: Progress | None, role: Role, first: float, share: float) -> Progress | None:
    """Return the progress of one model, whose load begins at the fraction `first` and is `share` of the whole."""
    if progress is None:
        return None
    return lambda phase, fraction: progress(f"{role}: {phase}", first + fraction * share)


def check_vocabularies(target: Identity, draft: Identity) -> None:
    """Refuse a draft of another vocabulary.

    Raises:
        VocabularyMismatch: the two differ; the message names both models.
    """
    if target.vocab_hash != draft.vocab_hash:
        raise VocabularyMismatch(
            f"The draft {draft.model} and the target {target.model} have different vocabularies; name a draft of the "
            "target's family with --draft-model, or use --mode plain."
        )
