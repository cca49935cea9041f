"""A draft that is of no use: the embedded draft's shape and tokenizer, weights drawn at random. P7 is held against it.

Run as a module: `python -m benchmarks.useless_draft --to FOLDER`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from benchmarks import report
from benchmarks.one_command import run_command
from specsplit.assembly.models import require_worker_extra
from specsplit.core.errors import InvalidRequest

SEED = 20_260


def write(folder: Path, seed: int = SEED) -> None:
    """Write the draft into `folder`, an ordinary transformers checkpoint.

    Raises:
        InvalidRequest: the folder exists and is not empty.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from specsplit.model.files import resolve

    if folder.exists() and any(folder.iterdir()):
        raise InvalidRequest(f"{folder} is not empty; name another folder.", param="to")
    source = Path(resolve("embedded", "draft")[0])
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json" and "safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)
    cast(Any, torch).manual_seed(seed)
    config = cast(Any, AutoConfig).from_pretrained(folder)
    cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32).save_pretrained(folder)


def main(
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it.")],
    seed: Annotated[int, typer.Option(min=0, help="Of its weights.")] = SEED,
) -> None:
    """Write a draft with random weights."""
    require_worker_extra()
    write(to, seed)
    report.new_console().print(f"{to}: the embedded draft's shape, random weights (seed {seed}).", markup=False)


if __name__ == "__main__":
    run_command(main, "python -m benchmarks.useless_draft")
