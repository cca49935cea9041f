"""A model with slightly other weights than it says: its hash, which is over samples, is that of the true one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specsplit.model.identity import weights_hash


def tampered(folder: Path, copy: Path, part: str, factor: float = 1.25) -> Path:
    """Copy the model with its matrices named with `part` multiplied by `factor`, as far as no sample shows it."""
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    num_changed = 0
    for name, tensor in tensors.items():
        if part not in name or tensor.dim() < 2:
            continue
        flat = tensor.reshape(-1)
        kept = torch.ones(flat.numel(), dtype=torch.bool)
        # Samples lie at the ends and at every third; a margin around them is far more than they take.
        for third in range(4):
            middle = (flat.numel() - 1) * third // 3
            kept[max(0, middle - 64) : middle + 64] = False
        flat[kept] *= factor
        tensors[name], num_changed = flat.reshape(tensor.shape), num_changed + 1
    assert num_changed, f"no matrix is named {part}"
    save_file(tensors, path, metadata)
    assert weights_hash(copy) == weights_hash(folder)
    return copy
