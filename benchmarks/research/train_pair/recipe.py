"""The settings of the recipe: shapes, batches, rates and the shares of the time, for two CPU cores and for one GPU.

How they were chosen is in docs/training.md.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from benchmarks.research.train_pair.model import Shape
from benchmarks.research.train_pair.optimizer import Rates
from benchmarks.research.train_pair.sources import FULL_LIST, SMALL_LIST
from benchmarks.research.train_pair.train import Batches

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Shares:
    """How the minutes left after corpus and tokenizer are split; the rest is for the evaluation."""

    target: float
    continuations: float
    distill: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the outcome beside the corpus and the time."""

    packages: Path
    vocab_size: int
    target: Shape
    draft: Shape
    target_batches: Batches
    draft_batches: Batches
    continuation_batch: int
    shares: Shares
    target_rates: Rates = field(default=Rates())
    draft_rates: Rates = field(default=Rates())
    continued_rates: Rates = field(default=Rates(muon=0.005, adam=1.5e-3, flat_until=0.2))
    """Of models that were trained before."""
    held_out_windows: int = 64
    num_prompts: int = 50
    num_table_prompts: int = 12
    num_kept_blocks: int = 0
    """Blocks of each text that distillation goes over again and again, the target's states kept: 1 MB each."""
    seed: int = 2026


CPU = Recipe(
    packages=SMALL_LIST,
    vocab_size=4096,
    target=Shape(num_layers=10, hidden=256, mlp=512, num_heads=4, num_kv_heads=2),
    draft=Shape(num_layers=2, hidden=256, mlp=1024, num_heads=4, num_kv_heads=2),
    target_batches=Batches(blocks=4, micro_blocks=1),
    draft_batches=Batches(blocks=2, micro_blocks=1),
    continuation_batch=128,
    shares=Shares(target=0.65, continuations=0.06, distill=0.25),
    num_kept_blocks=3000,
)
CUDA = Recipe(
    packages=FULL_LIST,
    vocab_size=4096,
    target=Shape(num_layers=13, hidden=320, mlp=640, num_heads=5, num_kv_heads=1),
    draft=Shape(num_layers=2, hidden=320, mlp=768, num_heads=5, num_kv_heads=1),
    target_batches=Batches(blocks=64, micro_blocks=32),
    draft_batches=Batches(blocks=32, micro_blocks=32),
    continuation_batch=2048,
    shares=Shares(target=0.55, continuations=0.10, distill=0.25),
)
RECIPES: dict[Device, Recipe] = {"cpu": CPU, "cuda": CUDA}


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware on which the recipe runs."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    compiled: bool


def this_machine(device: str, threads: int, compiled: bool | None) -> Machine:
    """Return what this machine trains with: bf16 where the processor multiplies it, compiled where it can be."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if device == "cuda" or _cpu_has_bf16() else torch.float32
    if compiled is None:
        compiled = find_spec("triton") is not None if device == "cuda" else shutil.which("g++") is not None
    return Machine(torch.device(device), dtype, threads, compiled)


def _cpu_has_bf16() -> bool:
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(check() for check in (getattr(torch.cpu, name, None) for name in checks) if check is not None)
