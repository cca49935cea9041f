"""Whether this installation can run models. Importing it is cheap: torch comes only with the check."""

from __future__ import annotations

import importlib

from specsplit.core.errors import MissingExtra

_WORKER_PACKAGES = ("torch", "transformers", "safetensors")


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


def require_metrics() -> None:
    """Import what writes the page of --metrics.

    Raises:
        MissingExtra: prometheus_client is not installed.
    """
    try:
        importlib.import_module("prometheus_client")
    except ModuleNotFoundError as error:
        raise MissingExtra("--metrics needs prometheus_client: pip install 'specsplit[worker]'.") from error
