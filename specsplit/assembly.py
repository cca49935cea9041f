"""Settings to objects: engines over models loaded here, or clients of workers elsewhere, and orchestrators over either.

The only file that sees engines and RPC clients together. Importing it is cheap: torch comes with the models, grpc with
the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import os
import random
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specsplit.core.defaults import EMBEDDED, SERVED_SESSIONS, Role
from specsplit.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MissingExtra,
    ModelDamaged,
    ResourceError,
    VocabularyMismatch,
    WorkerUnreachable,
)
from specsplit.core.ports import Drafter, Tokenizer, Verifier
from specsplit.core.sections import OrchestratorSettings, WorkerSettings
from specsplit.core.settings import Settings
from specsplit.core.types import Identity, TokenizerFiles
from specsplit.orchestrator.pipeline import Orchestrator
from specsplit.orchestrator.records import Patience, Request, Speculation

if TYPE_CHECKING:
    from specsplit.draft.engine import DraftEngine
    from specsplit.model.loader import LoadedModel
    from specsplit.rpc.server import Server
    from specsplit.target.engine import TargetEngine

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Called with what is being loaded and the fraction done, from 0 to 1 over all models."""
_WORKER_PACKAGES = ("torch", "transformers", "safetensors")
_PROPOSE_S, _VERIFY_S = 10.0, 600.0
"""What one call may take: a draft's prefill that is cut off goes on from there, a hung target shows without it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """The loaded models of one process; without a draft it decodes plainly."""

    target: LoadedModel
    draft: LoadedModel | None

    @property
    def degraded(self) -> list[str]:
        """Return a sentence for everything that works less well than it could."""
        reasons = [
            not_recorded(model)
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


def not_recorded(model: LoadedModel) -> str:
    """Return the sentence for a model whose forward stays in Python."""
    return f"The forward of {model.name} could not be recorded, so it runs slower."


class Workers:
    """A target, a draft where there is one, and the tokenizer they share; close it when its requests have ended."""

    def __init__(
        self, verifier: Verifier, drafter: Drafter | None, tokenizer: Tokenizer, *, are_remote: bool = False
    ) -> None:
        self.verifier = verifier
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._are_remote = are_remote
        self._orchestrators: dict[tuple[Speculation, Patience], Orchestrator] = {}

    def orchestrator(self, settings: OrchestratorSettings) -> Orchestrator:
        """Return the orchestrator that runs rounds as `settings` say; what it learns of the workers, it keeps."""
        speculation = Speculation(
            mode=settings.mode, nodes=settings.nodes, depth=settings.depth, branching=settings.branching
        )
        draft_s = settings.draft_patience if self._are_remote else math.inf  # here the two take turns anyway
        patience = Patience(retry_s=settings.retry, draft_s=draft_s)
        key = (speculation, patience)
        if key not in self._orchestrators:
            drafter = None if settings.mode == "plain" else self.drafter
            self._orchestrators[key] = Orchestrator(
                self.verifier, drafter, self.tokenizer, speculation, patience=patience
            )
        return self._orchestrators[key]

    async def aclose(self) -> None:
        """End what the orchestrators still do in the background; the workers are their owner's to close."""
        for orchestrator in self._orchestrators.values():
            await orchestrator.aclose()


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
        max_sessions=settings.target.sessions or 1,
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
        max_sessions=settings.draft.sessions or 1,
        node_limit=node_limit,
        progress=lambda phase, fraction: report(f"draft: {phase}", share + fraction * share),
    )
    if draft.tokenizer is None:
        raise ModelDamaged(f"{draft.name} has no tokenizer files to compare with the target's; add its tokenizer.json.")
    check_vocabularies(target.identity, draft.identity)
    return Models(target, draft)


def load_worker(role: Role, settings: WorkerSettings, progress: Progress | None = None) -> LoadedModel:
    """Load the model of a worker that serves.

    Raises:
        MissingExtra, ModelError, ResourceError, InvalidRequest: it cannot be loaded here, and why.
    """
    require_worker_extra()
    from specsplit.model.loader import load_model

    model = load_model(
        settings.model or EMBEDDED,
        role=role,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        context=settings.context,
        max_sessions=settings.sessions or SERVED_SESSIONS,
        progress=progress,
    )
    if model.tokenizer is None:
        raise ModelDamaged(f"{model.name} has no tokenizer files, which others need; add its tokenizer.json.")
    return model


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


def opened(settings: Settings, models: Models | None) -> AbstractAsyncContextManager[Workers]:
    """Run engines over `models` for the length of the block, or without any connect to the workers elsewhere."""
    return running(models) if models is not None else connected(settings)


@asynccontextmanager
async def running(models: Models) -> AsyncGenerator[Workers]:
    """Run an engine over each model for the length of the block."""
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.device import LoopDevice
    from specsplit.target.engine import TargetEngine

    device = LoopDevice(models.target.threads)  # one for both: they take turns
    target = TargetEngine(models.target, device)
    draft = DraftEngine(models.draft, device) if models.draft is not None else None
    workers = Workers(target, draft, models.tokenizer)
    try:
        yield workers
    finally:
        await workers.aclose()
        await target.aclose()
        if draft is not None:
            await draft.aclose()
        await device.close()


@asynccontextmanager
async def serving(model: LoadedModel, settings: WorkerSettings) -> AsyncGenerator[Server]:
    """Serve `model` in its role for the length of the block; sessions whose client has vanished are freed.

    Raises:
        InvalidSettings, ResourceError: it cannot listen there.
    """
    from specsplit.draft.engine import DraftEngine
    from specsplit.engine.device import DeviceThread
    from specsplit.rpc import server
    from specsplit.target.engine import TargetEngine

    async with AsyncExitStack() as stack:
        device = DeviceThread(model.role, model.threads)
        stack.push_async_callback(device.close)
        ttl_s, listen = settings.session_ttl, settings.listen
        if model.role == "draft":
            drafter = engine = DraftEngine(model, device, ttl_s=ttl_s)
            service = server.serving(listen=listen, drafter=drafter, num_sessions=lambda: drafter.num_sessions)
        else:
            verifier = engine = TargetEngine(model, device, ttl_s=ttl_s)
            service = server.serving(listen=listen, verifier=verifier, num_sessions=lambda: verifier.num_sessions)
        stack.push_async_callback(engine.aclose)
        sweeping = asyncio.create_task(_sweep(engine, ttl_s / 4))
        stack.callback(sweeping.cancel)
        yield await stack.enter_async_context(service)


async def _sweep(engine: DraftEngine | TargetEngine, period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        try:
            await engine.sweep()
        except Exception:  # noqa: BLE001 - whatever it was, the next sweep shall come
            _log.exception("freeing idle sessions failed")


_ONE_TRY_S = 5.0
"""What a worker gets to answer at all, however little patience there is: a dead link shows within it."""


@asynccontextmanager
async def connected(settings: Settings) -> AsyncGenerator[Workers]:
    """Connect to the workers elsewhere for the length of the block; the tokenizer is the target's.

    Raises:
        LinkError: the target cannot be reached for as long as the settings allow, or is none.
        ModelDamaged: its tokenizer cannot be read.
    """
    from specsplit.model.tokenizer import held_tokenizer_hash
    from specsplit.rpc.clients import RemoteDrafter, RemoteVerifier

    assert settings.target.address is not None, "whoever connects has an address"
    async with AsyncExitStack() as stack:
        verifier = RemoteVerifier(settings.target.address, call_timeout_s=_VERIFY_S)
        stack.push_async_callback(verifier.aclose)
        drafter = None
        if settings.draft_address is not None:
            drafter = RemoteDrafter(settings.draft_address, call_timeout_s=_PROPOSE_S)
            stack.push_async_callback(drafter.aclose)
        cache = _cache_folder()

        async def fetch() -> TokenizerFiles:
            named = (await verifier.ping()).tokenizer_hash
            return await verifier.tokenizer_files(held_tokenizer_hash(cache / named) if cache and named else "")

        chosen = settings.orchestrator
        patience_s = chosen.retry if chosen.timeout is None else min(chosen.retry, chosen.timeout)
        files = await _retried(fetch, settings.target.address, patience_s)
        workers = Workers(verifier, drafter, _load_tokenizer(files, cache), are_remote=True)
        stack.push_async_callback(workers.aclose)
        yield workers


async def _retried(call: Callable[[], Awaitable[T]], address: str, patience_s: float) -> T:
    """Call until the worker answers, for `patience_s` seconds and at least once."""
    begun_s = time.monotonic()
    pause_s = 0.05
    while True:
        left_s = begun_s + patience_s - time.monotonic()
        try:
            return await asyncio.wait_for(call(), max(left_s, _ONE_TRY_S))
        except TimeoutError as error:
            raise WorkerUnreachable(f"The target at {address} gave no answer; check --target, or wait.") from error
        except (WorkerUnreachable, DeadlineExceeded):
            if time.monotonic() + pause_s > begun_s + patience_s:
                raise
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, 1.0)


def _load_tokenizer(files: TokenizerFiles, cache: Path | None) -> Tokenizer:
    """Return the tokenizer; its files stay in `cache` under their hash, or for want of a writable one nowhere."""
    from specsplit.model.tokenizer import tokenizer_from_files

    if cache is not None:
        with contextlib.suppress(ResourceError):  # a folder that cannot be written
            return tokenizer_from_files(files, cache / files.hash)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="specsplit-")
    except OSError as error:
        raise ResourceError("There is no place for the target's tokenizer; set XDG_CACHE_HOME to a folder.") from error
    with scratch as folder:
        return tokenizer_from_files(files, Path(folder) / "tokenizer")


def _cache_folder() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in many containers
        return None
    return home / "specsplit" / "tokenizers"


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
        timeout_s=settings.timeout,
    )
