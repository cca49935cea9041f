"""The stage that begins from a trained pair instead of from nothing: `grow`. What comes after is as ever."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from benchmarks.research.train_pair import model, sittings, stages, tokenizer
from benchmarks.research.train_pair.continuations import ROW_TOKENS
from benchmarks.research.train_pair.data import Stream
from benchmarks.research.train_pair.grow import grown, narrowed
from benchmarks.research.train_pair.model import Shape
from benchmarks.research.train_pair.stages import Run
from specsplit.core.errors import InvalidSettings

NUM_BLOCKS_READ = 12
"""Blocks of text that tell which units of the draft's MLP the others can replace."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Shapes to begin with; None keeps those of the pair."""

    target: Shape | None = None
    draft_mlp: int | None = None
    keeps_target: bool = False
    """The target stays as it is; only the draft is trained."""


def shape_of(pair: Path) -> Shape:
    """Return the shape of a pair's target."""
    _require_pair(pair)
    return Shape.of(AutoConfig.from_pretrained(pair / "target"))


def _require_pair(pair: Path) -> None:
    for name in ("target", "draft"):
        if not (pair / name / "model.safetensors").exists():
            raise InvalidSettings(f"{pair} holds no pair to begin from: {name}/model.safetensors is missing.")


def begin(run: Run, pair: Path, wanted: Beginning) -> None:
    """Put into the workspace what training starts from, unless it is there.

    Raises:
        InvalidSettings: no pair is there, a shape cannot be reached from its own, or another tokenizer is here.
    """
    space = run.space
    if "earlier" in space.record():
        return
    _require_pair(pair)
    _take_tokenizer(run, pair / "target" / "tokenizer.json")
    stages.build_tokenizer(run)
    target = model.load(pair / "target")
    if wanted.keeps_target:
        shutil.copytree(pair / "target", space.target, dirs_exist_ok=True)
        space.note(target={"is_done": True, "is_kept": True})
    else:
        shape = wanted.target or Shape.of(target.config)
        model.save(grown(target, shape, run.recipe.seed), space.started_target, dtype=target.dtype)
        run.tell(f"the target begins as {shape}")
    draft = model.load(pair / "draft")
    if wanted.draft_mlp is not None:
        token_ids, _ = Stream.open(space.train_tokens).batch(run.recipe.seed, 0, NUM_BLOCKS_READ, ROW_TOKENS)
        draft = narrowed(draft, wanted.draft_mlp, token_ids)
    model.save(draft, space.started_draft, dtype=draft.dtype)
    run.tell(f"the draft begins as {Shape.of(draft.config)}")
    earlier = sittings.read(pair)
    space.note(earlier=earlier, sitting=max(1, len(earlier["draft"])))


def _take_tokenizer(run: Run, path: Path) -> None:
    space = run.space
    if not space.tokenizer.exists():
        tokenizer.save(tokenizer.load(path), space.tokenizer)
    elif tokenizer.load(space.tokenizer).to_str() != tokenizer.load(path).to_str():
        raise InvalidSettings(f"{space.root} has another tokenizer than the pair to begin from; choose another --work.")
