"""Packages that a process of the command line does without: nobody else's code runs in it that could miss them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast


def spare(package: str) -> None:
    """Let importing a package fail from now on, unless it is there already; transformers then goes on without it.

    Without models torch is a second and 200 MB for a tokenizer.
    """
    # `import torch` fails where sys.modules says None.
    cast("dict[str, ModuleType | None]", sys.modules).setdefault(package, None)
