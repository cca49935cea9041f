"""Whether this installation can run models. Importing it is cheap: torch comes only with the check."""

from __future__ import annotations

import importlib
from importlib import metadata

from specsplit.core.errors import DeviceUnavailable, MissingExtra
from specsplit.model.meanwhile import without_collections
from specsplit.model.model_heads import import_models

_WORKER_PACKAGES = ("torch", "transformers", "safetensors")


def require_worker_extra() -> None:
    """Import what runs models.

    Raises:
        MissingExtra: torch or one of its companions is not installed.
    """
    try:
        with without_collections():
            import_models()
            importlib.import_module("specsplit.model.loader")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _WORKER_PACKAGES:
            raise
        raise MissingExtra(f"Running a model here needs {error.name}: pip install 'specsplit[worker]'.") from error


def check_device(device: str) -> None:
    """Refuse a GPU that the installed torch could not use, before it is imported, which takes seconds.

    Raises:
        DeviceUnavailable: torch is a build for CPUs.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # it is missed where it is imported
    if device != "cpu" and version.endswith("+cpu"):
        raise DeviceUnavailable(
            f"No CUDA device can be used by torch {version}, a build for CPUs: install the one for CUDA, "
            "or use --device cpu."
        )


def require_metrics() -> None:
    """Import what writes the page of --metrics.

    Raises:
        MissingExtra: prometheus_client is not installed.
    """
    try:
        importlib.import_module("prometheus_client")
    except ModuleNotFoundError as error:
        raise MissingExtra("--metrics needs prometheus_client: pip install 'specsplit[worker]'.") from error
