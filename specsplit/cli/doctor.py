"""`specsplit doctor`: checks an installation, from versions to loadable models, and says how to mend it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from specsplit.assembly.generation_settings import generation_settings
from specsplit.assembly.models import LoadedDraft, Progress, check_models, load_local, load_worker
from specsplit.assembly.requests import check_request_values
from specsplit.cli import render
from specsplit.cli.doctor_checks import Check, exactness_check, guarded, is_coordinator, no_draft_check, revision_checks
from specsplit.cli.doctor_links import CERTIFICATE, check_links
from specsplit.cli.doctor_memory import memory_checks
from specsplit.core.defaults import Role
from specsplit.core.errors import SpecSplitError
from specsplit.core.settings import EffectiveSettings, Settings
from specsplit.core.types import Identity
from specsplit.model.extra import require_worker_extra
from specsplit.model.longest_context import longest_context
from specsplit.model.memory_size import shown_memory

if TYPE_CHECKING:
    from specsplit.model.loader import LoadedModel

_PACKAGES = ("specsplit", "transformers", "tokenizers", "pydantic", "grpcio", "protobuf")
_WORKER_PACKAGES = ("torch", "safetensors")
_OLDEST_PYTHON = (3, 11)
_GIB = 2**30


def run(given: Mapping[str, Any]) -> int:
    """Run every check and print the table; return 0 if all is well and 1 otherwise."""
    checks = [_python(), *(_package(name) for name in _PACKAGES), *guarded("settings", _check_settings, given)]
    is_ok = all(check.is_ok for check in checks)
    if given.get("json"):
        sys.stdout.write(json.dumps({"ok": is_ok, "checks": [asdict(check) for check in checks]}) + "\n")
    else:
        _print_table(checks)
    sys.stdout.flush()
    return 0 if is_ok else 1


def _check_settings(given: Mapping[str, Any]) -> Iterator[Check]:
    """Check the settings and all that they name.

    Every part runs even if one before it failed: a user wants to see all that is wrong at once.

    Raises:
        InvalidSettings: the settings cannot be read.
    """
    chosen = {name: value for name, value in given.items() if name not in ("config", "json")}
    effective = generation_settings(chosen, config=given.get("config"), as_options=True, purpose="check")
    yield from guarded("settings", _check_values, effective)
    failed: set[str] = set()
    for check in guarded("links", check_links, effective):
        failed |= set() if check.is_ok else {check.name}
        yield check
    yield from _check_workers(effective, failed)


def _check_values(effective: EffectiveSettings) -> Iterator[Check]:
    check_request_values(effective.settings.orchestrator)
    differ = "1 differs" if len(effective.origins) == 1 else f"{len(effective.origins)} differ"
    yield Check("settings", True, f"{differ} from the defaults")


def _python() -> Check:
    is_ok = sys.version_info >= _OLDEST_PYTHON
    remedy = "" if is_ok else f"; SpecSplit needs {'.'.join(map(str, _OLDEST_PYTHON))} or newer"
    return Check("python", is_ok, platform.python_version() + remedy)


def _package(name: str, *, is_needed: bool = True) -> Check:
    try:
        return Check(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        if name == "specsplit":
            return Check(name, True, "run from a checkout")
        if not is_needed:
            return Check(name, True, "not installed, and needed only where a model runs")
        extra = "[worker]" if name in _WORKER_PACKAGES else ""
        return Check(name, False, f"not installed: pip install 'specsplit{extra}'")


def _check_workers(effective: EffectiveSettings, failed: Collection[str]) -> Iterator[Check]:
    """Check the workers elsewhere, and the packages, devices and models that run here.

    Workers whose links need a certificate whose check is among those that `failed` are not asked.
    """
    settings = effective.settings
    is_linked = settings.is_remote or settings.draft_address is not None
    has_gateway = bool(settings.gateway.targets or settings.gateway.drafts)
    # Addresses alone ask for a check of those workers, not of the default pair.
    is_linked_only = (is_linked and not settings.is_remote) or (has_gateway and "draft.model" not in effective.origins)
    loads = settings.has_local_model and ("target.model" in effective.origins or not is_linked_only)
    yield from (_package(name, is_needed=loads) for name in _WORKER_PACKAGES)
    here: dict[Role, Identity] = {}
    if loads:
        yield from guarded("models", _machine, settings, here)
    if is_linked and CERTIFICATE not in failed:
        # Imported late: it brings grpc, which a user of local models need not have working.
        from specsplit.cli.doctor_services import check_services

        yield from guarded("workers", check_services, settings, here)
    if has_gateway and f"gateway {CERTIFICATE}" not in failed:
        from specsplit.cli.doctor_services import check_gateway_workers

        yield from guarded("gateway workers", check_gateway_workers, settings)
    if settings.target.stages and CERTIFICATE not in failed:
        from specsplit.cli.doctor_stages import check_stages

        yield from guarded("stages", check_stages, settings)


def _machine(settings: Settings, here: dict[Role, Identity]) -> Iterator[Check]:
    """Check the devices and, if the worker packages are installed, the models, whose identities go to `here`.

    Raises:
        SpecSplitError: a model cannot be loaded.
    """
    check_models(settings)  # at once, without the seconds that torch takes
    try:
        require_worker_extra()
    except SpecSplitError as error:
        yield Check("worker", False, str(error))
        return
    import torch

    yield Check("cpu", True, f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    wants_cuda = any(device.startswith("cuda") for device in (settings.target.device, settings.draft.device))
    yield Check("cuda", bool(names) or not wants_cuda, ", ".join(names) or "no device")
    yield from _models(settings, here)


def _models(settings: Settings, here: dict[Role, Identity]) -> Iterator[Check]:
    with render.loading_bar() as progress:
        models = _loaded(settings, progress)
    if is_coordinator(settings):
        yield Check("target", True, f"{settings.target.model}: not loaded here, since its layers are on stages")
    for model in models:
        here[model.role] = model.identity
        yield from (_model(model), *revision_checks(model.role, model.identity), _exactness(model))
    yield from memory_checks(models, settings)
    if len(here) == 2:
        yield Check("vocabulary", True, "the same for draft and target")
    elif not settings.has_draft:
        yield no_draft_check(settings)


def _loaded(settings: Settings, progress: Progress | None) -> list[LoadedModel]:
    """Load what runs here; beside a target that is cut, whose layers may fit no machine, only a draft that is named."""
    if is_coordinator(settings):
        is_named = settings.draft.model is not None and settings.draft_source is not None
        return [load_worker("draft", settings.draft, progress)] if is_named else []
    loaded = load_local(settings, progress)
    assert loaded is not None, "called where a model is placed here"
    return [loaded.draft] if isinstance(loaded, LoadedDraft) else list(filter(None, (loaded.target, loaded.draft)))


def _model(model: LoadedModel) -> Check:
    from specsplit.model.memory import available_bytes

    identity = model.identity
    cache_bytes = model.kv_bytes_per_token * (model.context + model.node_limit)
    cache, free = model.runner.cache, available_bytes(model.runner.device)
    limit = ""
    if cache.row_limit < cache.num_slots * cache.capacity:
        limit = f" a session and {shown_memory(cache.row_limit * cache.row_bytes)} in all"
    left = "" if free is None else f", {free / _GIB:.1f} GiB left"
    detail = (
        f"{identity.model}: {identity.dtype} on {identity.device}, vocabulary {identity.vocab_size}, "
        f"context {_context(model)}, weights {_weights(model)}, "
        f"KV {cache_bytes / _GIB:.2f} GiB{limit}{left}, threads {model.threads}, "
        f"forward {'recorded' if model.runner.is_recorded else 'not recorded: it works, but slower'}"
    )
    return Check(identity.role, True, detail)


def _weights(model: LoadedModel) -> str:
    """Return the weights' bytes, and of a model whose weights are rounded how many are in which format."""
    total, rounded = f"{model.weight_bytes / _GIB:.2f} GiB", model.runner.bytes_by_format
    if not rounded:
        return total
    rest = shown_memory(model.weight_bytes - sum(rounded.values()))
    parts = [f"{shown_memory(size)} in {form}" for form, size in rounded.items()]
    return f"{total} ({', '.join(parts)}, {rest} in {str(model.runner.dtype).removeprefix('torch.')})"


def _context(model: LoadedModel) -> str:
    """Return the context, and what the model allows if the default is less."""
    config: Any = model.runner.model.config
    text: Any = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    limit = longest_context(getattr(text, "max_position_embeddings", None), rope)
    is_less = limit is not None and model.context < limit
    option = "--context" if model.role == "target" else "--draft-context"
    return f"{model.context} of the {limit} that it was made for ({option})" if is_less else str(model.context)


def _exactness(model: LoadedModel) -> Check:
    """Return the line that says which bits the model's forwards have, and what was proved at load."""
    return exactness_check(model.role, model.identity, model.runner.exactness_reason)


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "state", "detail", box=None, pad_edge=False)
    for check in checks:
        # Details hold addresses and messages; rich would take their brackets for markup.
        table.add_row(check.name, check.state, check.detail.replace("[", "\\["))
    Console(soft_wrap=not sys.stdout.isatty()).print(table)
