"""Imports transformers' models without reading all their files a second time.

transformers reads the head of each of its 2,000 files to know its names, as it is imported and once more for the
package of its models: a quarter of a second each.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_PREFIX = "models"
Structure = dict[frozenset[str], dict[str, set[str]]]
"""Names by module, by the packages that they need."""


def import_models() -> None:
    """Import the package of transformers' models, with what importing transformers itself has read.

    A transformers that reads otherwise does so as often as it likes.
    """
    if "transformers.models" in sys.modules:
        return
    import_utils: Any = import_module("transformers.utils.import_utils")
    read, package = import_utils.define_import_structure, Path(import_utils.__file__).parents[1] / _PREFIX
    if not hasattr(read, "cache_info"):
        return
    num_read = read.cache_info().misses
    known: Structure = read(package, prefix=_PREFIX)
    if read.cache_info().misses != num_read:
        return

    def read_once(module_path: str, prefix: str | None = None) -> Structure:
        if prefix is not None or Path(module_path) != package / "__init__.py":
            return read(module_path, prefix)
        return without_prefix(known)

    import_utils.define_import_structure = read_once
    try:
        import_module("transformers.models")
    finally:
        import_utils.define_import_structure = read


def without_prefix(structure: Structure) -> Structure:
    """Return the part of transformers' own structure that is its models', as their package names it."""
    start = f"{_PREFIX}."
    found = {
        needed: {name.removeprefix(start): set(names) for name, names in modules.items() if name.startswith(start)}
        for needed, modules in structure.items()
    }
    return {needed: modules for needed, modules in found.items() if modules}
