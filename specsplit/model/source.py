"""Finds a model by its name: the embedded pair, a folder, or a hub id. Knows neither torch nor transformers.

Behind a hub id, `@` and a branch, tag or commit may name a revision of it: org/name@v1.0. What cannot be had is refused
here, at once: before torch is imported, and without waiting for a hub that is away.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidSettings, ModelDamaged, ModelNotFound, ModelUnsupported
from specsplit.core.paths import expanded

UNREACHABLE = "{name} is not cached here and the model hub cannot be reached; pass a local folder, or go online."
NO_HUB_ID = "{name} is neither a model folder nor a valid hub id."
_COMMIT = re.compile(r"[0-9a-f]{40}")
_GGUF = re.compile(r"gguf(:[\w.-]+)?$", re.IGNORECASE)
"""The end of a file's name, or of a hub id with the tag that llama.cpp puts behind it."""
_PATIENCE_S = 2.0
"""Longest wait for the hub; without a connection by then the cache is all there is."""
_REMEMBERED_S = 60.0


def check_source(source: str, role: str) -> None:
    """Refuse a model that is not here and cannot be fetched either.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported, InvalidSettings.
    """
    path, name = resolve(source, role)
    if Path(path).is_dir():
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and _cached(path) is None:
        raise ModelNotFound(UNREACHABLE.format(name=name))


def resolve(source: str, role: str) -> tuple[str, str]:
    """Return the path of the model, a folder or a hub id with its revision if it has one, and the name to show.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported.
        InvalidSettings: it names a revision of a model that is not on the hub, or the address of the hub or of the
            proxy on the way to it is none.
    """
    try:
        return _resolved(source, role)
    except OSError as error:
        # A name too long for a file system, or a folder that may not be looked into.
        raise ModelNotFound(f"{source[:100]} cannot be looked for ({error.strerror}).") from error


def _resolved(source: str, role: str) -> tuple[str, str]:
    if source == EMBEDDED:
        return str(Path(__file__).parent / "embedded" / role), EMBEDDED
    model, revision = _parts(source)
    if revision and (model == EMBEDDED or expanded(model).is_dir()):
        raise InvalidSettings(
            f"{model} is not on the hub, so it has no revision {revision}; leave the revision out, or name a hub id."
        )
    if _GGUF.search(source) and not expanded(source).is_dir():
        what = "is a GGUF file" if source.lower().endswith(".gguf") else "has GGUF files"
        raise ModelUnsupported(
            f"{source} {what}, and models are read from safetensors: name the folder or hub id of the model "
            "that it was made from."
        )
    if source.startswith(("http://", "https://")):
        hub_id = "/".join(source.split("/")[3:5]) or "Qwen/Qwen3-0.6B"
        raise ModelNotFound(f"{source} is a web address; name the model by its hub id, such as {hub_id}.")
    # A hub id has one slash at most and begins with a letter or a digit.
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).exists()
    return _folder(source) if looks_local else _on_hub(source)


def hub_arguments(path: str) -> tuple[str, dict[str, Any]]:
    """Return what opens a path of `resolve` in transformers and on the hub: what is named, and its revision by name."""
    model, revision = (path, "") if Path(path).exists() else _parts(path)
    return model, {"revision": revision} if revision else {}


def model_folder(path: str) -> Path | None:
    """Return the folder with the files of a model that was loaded from a path of `resolve`, or that is cached."""
    return Path(path) if Path(path).is_dir() else _cached(path)


def has_adapter(folder: Path | None) -> bool:
    """Return whether an adapter, as peft saves one, lies in the folder of a model."""
    return folder is not None and (folder / "adapter_config.json").is_file()


def commit_of(folder: Path | None) -> str:
    """Return the commit of the hub whose files are in `folder`; empty if they are not from the hub."""
    # The hub's cache: models--ORG--NAME/snapshots/COMMIT/config.json.
    is_snapshot = folder is not None and folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name)
    return folder.name if folder is not None and is_snapshot else ""


def at_commit(path: str) -> str:
    """Return the path with the commit that its files in the cache are of, so that later files are of no other one."""
    commit = "" if Path(path).is_dir() else commit_of(_cached(path))
    return f"{_parts(path)[0]}@{commit}" if commit else path


def public_name(source: str) -> str:
    """Return the name by which clients may know a model: a hub id, or a folder without the path to it."""
    folder = expanded(source)
    return folder.resolve().name if folder.is_dir() and source != EMBEDDED else _parts(source)[0]


def _parts(source: str) -> tuple[str, str]:
    """Return a name of a model and the revision behind it; empty if there is none, or the whole is a path."""
    model, _, revision = source.partition("@")
    return (source, "") if Path(source).exists() else (model, revision)


def _folder(source: str) -> tuple[str, str]:
    folder = expanded(source)
    if folder.is_file():
        raise ModelNotFound(f"There is no model folder at {source}, which is a file; name the folder that it is in.")
    if not folder.is_dir():
        raise ModelNotFound(f"There is no model folder at {source}.")
    has_config = (folder / "config.json").is_file()
    has_weights = any(not path.name.startswith("adapter_") for path in folder.glob("*.safetensors"))
    if has_adapter(folder) and not (has_config and has_weights):
        raise ModelUnsupported(
            f"{source} is a LoRA adapter, not a whole model: merge it into its base model (merge_and_unload of peft), "
            "and name the folder that you save that to."
        )
    if not has_config:
        raise ModelNotFound(f"{source} holds no config.json, so it is not a model folder.")
    if not has_weights:
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        raise ModelDamaged(
            f"{source} holds only pickled weights ({pickled[0].name}), never opened here; convert them to safetensors."
            if pickled
            else f"{source} holds no safetensors weights."
        )
    return str(folder), source


def _on_hub(source: str) -> tuple[str, str]:
    """Return the hub id, or the folder of its files in the cache if the hub is away."""
    from huggingface_hub import constants

    cached = _cached(source)
    if constants.HF_HUB_OFFLINE or _hub_answers(constants.ENDPOINT, time.monotonic() // _REMEMBERED_S):
        return source, source
    if cached is None:
        raise ModelNotFound(UNREACHABLE.format(name=source))
    return str(cached), source


def _cached(source: str) -> Path | None:
    """Return the folder of a hub model's files in the cache, if its config is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        repository, options = hub_arguments(source)
        config = try_to_load_from_cache(repository, "config.json", **options)
    except HFValidationError as error:
        shown = source if source.isprintable() and source.strip() else repr(source)
        raise ModelNotFound(NO_HUB_ID.format(name=shown)) from error
    return Path(config).parent if isinstance(config, str) else None


@lru_cache(maxsize=1)
def _hub_answers(endpoint: str, period: float) -> bool:
    """Return whether the hub, or the proxy on the way to it, takes a connection; asked once a `period`."""
    scheme, address = _address(endpoint, "HF_ENDPOINT")
    proxies = getproxies()
    # httpx, by way of which huggingface_hub asks the hub, chooses the proxy so too.
    chosen = next((kind for kind in (scheme, "all") if proxies.get(kind)), None)
    if chosen is not None and not proxy_bypass(address[0]):
        proxy = proxies[chosen]
        _, address = _address(proxy if "://" in proxy else f"http://{proxy}", f"{chosen.upper()}_PROXY")
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, _PATIENCE_S).close()
        except OSError:
            return
        answered.set()

    # A resolver of names may take minutes and cannot be cancelled, so a thread that nobody waits for asks it.
    asking = threading.Thread(target=connect, name="specsplit-hub", daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    return answered.is_set()


def _address(url: str, variable: str) -> tuple[str, tuple[str, int]]:
    """Return the scheme, host and port of a URL that an environment variable holds."""
    try:
        parts = urlsplit(url)
        return parts.scheme, (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    except ValueError:  # whose words may hold a part of a proxy's password
        raise InvalidSettings(f"{variable} holds no valid URL; write it as http://host:port.") from None
