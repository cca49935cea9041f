"""Comparisons with transformers that a model has passed on this machine, so that its next load is spared them.

They are kept in the user's cache under all that their outcome follows from: the very files of the weights, config,
code, libraries and processor, and the shape of the KV slots. What was not passed is not kept, and is tried again.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import transformers

from specsplit.model.exactness import fingerprint
from specsplit.model.identity import weight_stamps
from specsplit.model.proofs import Proofs, digest
from specsplit.model.source import model_folder
from specsplit.model.transformers_models import PreTrainedModel

_FILE = "comparisons.json"


class Comparisons:
    """The comparisons that one model has passed; without a key nothing is known of it, or kept."""

    def __init__(self, key: str | None) -> None:
        self._key, self._proofs = key, Proofs(_FILE)

    def has(self, name: str) -> bool:
        """Whether the model has passed the comparison."""
        return self._key is not None and self._proofs.get(digest(self._key, name)) == ""

    def add(self, name: str) -> None:
        """Note that the model has passed the comparison."""
        if self._key is not None:
            self._proofs.put(digest(self._key, name), "")


def comparisons_of(model: PreTrainedModel, path: str, stamps: object, *others: object) -> Comparisons:
    """Return the comparisons of a model at a path of `resolve`, whose files had these stamps before they were read.

    `others` say how else it is computed. Nothing is known of a model on a GPU, whose driver and libraries have no
    fingerprint.
    """
    # Files that were replaced meanwhile are neither those that were read nor those that are there now.
    if model.device.type != "cpu" or stamps is None or stamps != weight_stamps(model_folder(path)):
        return Comparisons(None)
    settings = sorted(model.config.to_diff_dict().items(), key=str)
    return Comparisons(
        digest(stamps, settings, fingerprint(model.dtype), transformers.__version__, code_hash(), *others)
    )


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Return a hash of the code that computes forwards: this package's."""
    content = sha256()
    for path in sorted(path for kind in ("*.py", "*.cpp", "*.h") for path in Path(__file__).parent.rglob(kind)):
        content.update(path.read_bytes())
    return content.hexdigest()
