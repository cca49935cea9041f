"""Drafts that are made to be bad: the embedded one's shape with random weights, and a draft that takes so much longer.

Both are ordinary checkpoints. Torch is imported by the process that makes them, not by whoever imports this file.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.research.made_folder import beside, is_made, publish
from benchmarks.systems import System
from specsplit.core.errors import InvalidRequest

USELESS_SEED = 20_260
RECORD = "made.json"
"""What a useless draft was made from, left in its folder."""


@dataclass(frozen=True, slots=True)
class MadeDraft:
    """A draft to be measured with."""

    folder: str
    forward_ms: float | None = None
    """Duration of one token over 256 rows, in fp32; None if it is the source's."""
    source_forward_ms: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the fields in JSON types, and how many times as slow as its source it is."""
        slowness = self.forward_ms / self.source_forward_ms if self.forward_ms and self.source_forward_ms else None
        return {**asdict(self), "slowness": slowness}


@dataclass(frozen=True, slots=True)
class ServeMaking:
    """Makes the child that makes drafts."""

    def __call__(self) -> AbstractContextManager[Making]:
        """Start with nothing, and without transformers' own progress bars."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        return nullcontext(Making())


class Making:
    """Makes drafts; one that is in its folder already is not made again."""

    systems: Sequence[System] = ()

    def useless(self, source: str, folder: Path) -> MadeDraft:
        """Make one with random weights, in the place of one that was made from another source or seed."""
        if not is_made(folder, RECORD, _useless_recipe(_path(source), USELESS_SEED)):
            write_useless(source, folder)
        return MadeDraft(str(folder))

    def slow(self, source: str, folder: Path, slowness: float, threads: int) -> MadeDraft:
        """Make one that says the same and takes `slowness` times as long: an inflated copy.

        One that was made from another source is replaced. The folder is one of this `slowness`; how slow it is under
        `threads` is measured each time.

        Raises:
            ModelUnsupported: it cannot be inflated.
        """
        from benchmarks.research.inflate import RECORD as INFLATED
        from benchmarks.research.inflate import calibrated
        from benchmarks.research.inflated_model import verify_ms
        from specsplit.model.identity import weights_hash

        path = _path(source)
        before_ms = verify_ms(path, threads)
        if not is_made(folder, INFLATED, {"source_hash": weights_hash(path)}):
            calibrated(path, folder, slowness * before_ms, threads)
        return MadeDraft(str(folder), verify_ms(folder, threads), before_ms)


def write_useless(source: str, folder: Path, seed: int = USELESS_SEED) -> None:
    """Write a draft of the shape of `source`, its tokenizer and random weights into `folder`.

    Raises:
        InvalidRequest: the folder exists and is not empty.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if folder.exists() and any(folder.iterdir()):
        raise InvalidRequest(
            f"{folder} is not empty and has no {RECORD}; remove it, or name another folder.", param="drafts"
        )
    path = _path(source)
    with beside(folder) as scratch:
        for file in path.iterdir():
            if file.suffix == ".json" and "safetensors" not in file.name:
                shutil.copyfile(file, scratch / file.name)
        cast(Any, torch).manual_seed(seed)
        config = cast(Any, AutoConfig).from_pretrained(scratch)
        cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32).save_pretrained(scratch)
        publish(scratch, folder, RECORD, _useless_recipe(path, seed))


def _useless_recipe(path: Path, seed: int) -> dict[str, object]:
    from specsplit.model.identity import weights_hash

    return {"kind": "useless", "source_hash": weights_hash(path), "seed": seed}


def _path(source: str) -> Path:
    from specsplit.model.source import resolve

    return Path(resolve(source, "draft")[0])
