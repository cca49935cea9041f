"""Disaggregated speculative decoding: a draft proposes token trees, a target verifies them, the text is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsplit.api import Pipeline

    __version__: str

__all__ = ["Pipeline", "__version__"]


def __getattr__(name: str) -> object:
    """Import these on first use, since `import specsplit` is part of every start of the command line."""
    if name == "Pipeline":
        from specsplit.api import Pipeline

        return Pipeline
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("specsplit")
        except metadata.PackageNotFoundError:
            # A checkout runs without being installed.
            return "0.0.0"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
