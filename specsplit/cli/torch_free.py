"""A process that runs no model does without torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast


def spare_torch() -> None:
    """Keep transformers from importing torch for a tokenizer, which takes a second and 200 MB."""
    # `import torch` fails where sys.modules says None, and transformers then goes on without it.
    cast("dict[str, ModuleType | None]", sys.modules).setdefault("torch", None)
