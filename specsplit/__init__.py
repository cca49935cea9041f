"""Disaggregated speculative decoding: a draft proposes token trees, a target verifies them, the text is its own."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsplit.api import Pipeline, RequestOptions
    from specsplit.client import Client
    from specsplit.core.errors import (
        AccessDenied,
        ContextExceeded,
        CorruptPacket,
        DeadlineExceeded,
        DeviceUnavailable,
        InvalidPacket,
        InvalidRequest,
        InvalidSettings,
        LinkError,
        MissingExtra,
        ModelDamaged,
        ModelError,
        ModelNotFound,
        ModelUnsupported,
        NoFreeSlot,
        OutOfMemory,
        Overloaded,
        PeerMismatch,
        ResourceError,
        SessionError,
        SlotBehind,
        SpecSplitError,
        StageBehind,
        StaleEpoch,
        StaleRound,
        UsageError,
        VocabularyMismatch,
        WorkerClosed,
        WorkerFailed,
        WorkerUnreachable,
        WrongResult,
    )
    from specsplit.orchestrator.request import Chunk, Result

    __version__: str

# gRPC's own log lines stay off stderr: our errors say what they say. It reads this once, when it is imported; who has
# set it wants the lines, and who has imported grpc before has chosen.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its support of forks starts threads in a child that is about to become another program, and these crash it at times:
# a stage or worker that is started while calls are under way ended before it began (grpc/grpc issue 43055).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# transformers reads this when it is imported; where there is no torch it would complain on stderr, though a tokenizer
# needs none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# oneDNN keeps the code of every product by its number of rows, half a megabyte each and a thousand of them, twice: once
# itself, once in torch's layer above it. A server that read prompts of all lengths held half a gigabyte of it.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "256")

__all__ = [
    "AccessDenied",
    "Chunk",
    "Client",
    "ContextExceeded",
    "CorruptPacket",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "InvalidPacket",
    "InvalidRequest",
    "InvalidSettings",
    "LinkError",
    "MissingExtra",
    "ModelDamaged",
    "ModelError",
    "ModelNotFound",
    "ModelUnsupported",
    "NoFreeSlot",
    "OutOfMemory",
    "Overloaded",
    "PeerMismatch",
    "Pipeline",
    "RequestOptions",
    "ResourceError",
    "Result",
    "SessionError",
    "SlotBehind",
    "SpecSplitError",
    "StageBehind",
    "StaleEpoch",
    "StaleRound",
    "UsageError",
    "VocabularyMismatch",
    "WorkerClosed",
    "WorkerFailed",
    "WorkerUnreachable",
    "WrongResult",
    "__version__",
]
_PLACES = {
    "Chunk": "specsplit.orchestrator.request",
    "Client": "specsplit.client",
    "Pipeline": "specsplit.api",
    "RequestOptions": "specsplit.assembly.arguments",
    "Result": "specsplit.orchestrator.request",
}
"""The modules of the names that are no errors."""


def __getattr__(name: str) -> object:
    """Import these on first use, since `import specsplit` is part of every start of the command line."""
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("specsplit")
        except metadata.PackageNotFoundError:
            # A checkout runs without being installed.
            return "0.0.0"
    if name in __all__:
        return getattr(import_module(_PLACES.get(name, "specsplit.core.errors")), name)
    raise _missing(name)


def _missing(name: str) -> Exception:
    """Return the error about a name that is not here, with our word for it if vLLM or transformers has it."""
    from specsplit.assembly.other_names import answer_about_import

    said, answer = f"module {__name__!r} has no attribute {name!r}", answer_about_import(name)
    if answer is None:
        return AttributeError(said)
    # `from specsplit import LLM` replaces the words of an AttributeError by Python's own, but not those of an
    # ImportError. All others who ask, such as hasattr(), expect an AttributeError.
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":  # pyright: ignore[reportPrivateUsage]
        return ImportError(f"There is no {name} in specsplit; {answer}.", name=__name__)
    return AttributeError(f"{said}; {answer}")


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})
