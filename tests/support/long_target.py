"""A random llama with a context that takes prompts of several chunks, loaded once for each way to use it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from specsplit.core.defaults import Role
from specsplit.model.loader import LoadedModel, load_model
from tests.support.model_zoo import FAMILIES, save_model

_folders = TemporaryDirectory()


@cache
def long_folder(seed: int = 1) -> Path:
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 1024
    return save_model(Path(_folders.name) / f"llama-{seed}", config, seed=seed)


@cache
def long_model(num_slots: int, context: int = 900, role: Role = "target", seed: int = 1) -> LoadedModel:
    return load_model(
        str(long_folder(seed)), role=role, max_sessions=num_slots, context=context, threads=1, record=False
    )
