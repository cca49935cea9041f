"""Agreement with transformers' eager attention in bf16, model family by model family.

Both read the same texts in one forward each, so a position that differs changes no later one. fp64 is the truth that
both are held against: where its two best logits lie within bf16's rounding, either pick is as good as the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.environment import provenance
from benchmarks.report import console as report
from benchmarks.research.app import app
from specsplit.model.extra import require_worker_extra

if TYPE_CHECKING:
    from torch import Tensor

NUM_TOKENS, TEXT_TOKENS = 1000, 250
"""Positions that are compared, and those of a text; made models have short contexts."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often greedy picks differ at the same positions of the same texts."""

    model: str
    num_tokens: int
    num_near_ties: int
    """Positions at which the two best fp64 logits lie within one step of bf16."""
    ours_eager: int
    """Positions at which our bf16 and transformers' eager bf16 differ."""
    ours_eager_apart: int
    """Those of them that are no near ties."""
    ours_exact: int
    """Positions at which our bf16 and fp64 differ."""
    eager_exact: int
    """Positions at which transformers' eager bf16 and fp64 differ."""


def is_near_tie(exact: Tensor) -> Tensor:
    """Return where the two best of float64 logits [N, V] lie within one step of bf16 at the best, bool [N]."""
    best = exact.topk(2).values
    # A number m * 2^e with 0.5 <= m < 1 has steps of 2^(e - 8) in bf16, which has 8 significant bits.
    exponent = best[:, 0].frexp().exponent
    return best[:, 0] - best[:, 1] <= exact.new_tensor(2.0) ** (exponent - 8)


def compare(name: str, ours: Tensor, eager: Tensor, exact: Tensor) -> Agreement:
    """Return the figures of one model from its logits, each [N, V] at the same positions."""
    near, picks = is_near_tie(exact), [rows.argmax(-1) for rows in (ours, eager, exact)]
    differs = picks[0] != picks[1]
    return Agreement(
        model=name,
        num_tokens=len(exact),
        num_near_ties=int(near.sum()),
        ours_eager=int(differs.sum()),
        ours_eager_apart=int((differs & ~near).sum()),
        ours_exact=int((picks[0] != picks[2]).sum()),
        eager_exact=int((picks[1] != picks[2]).sum()),
    )


def measure(folder: Path, texts: Sequence[Sequence[int]]) -> Agreement:
    """Return the figures of a checkpoint whose weights bf16 holds; texts are token ids within its context."""
    import torch

    from specsplit.model.attention.metadata import SequenceInput
    from specsplit.model.loader import load_model

    # LongRoPE's factors follow from the context, and from the length of a text in transformers.
    longest = max(map(len, texts))
    runner = load_model(str(folder), role="target", dtype="bf16", context=longest, record=False).runner
    ours = [runner.forward([SequenceInput(0, 0, text, num_logits=len(text))])[0] for text in texts]
    theirs = [_logits(folder, dtype, texts) for dtype in (torch.bfloat16, torch.float64)]
    return compare(folder.name, torch.cat(ours), *theirs)


def _logits(folder: Path, dtype: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return transformers' logits at every position of the texts, [N, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped experts know no fp64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **ways).eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([text])).logits[0] for text in texts])


def random_texts(folder: Path, seed: int) -> list[list[int]]:
    """Return `NUM_TOKENS` random ids of a checkpoint's vocabulary, cut into texts."""
    import torch
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder).get_text_config()
    drawn = torch.randint(config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [drawn[start : start + TEXT_TOKENS] for start in range(0, NUM_TOKENS, TEXT_TOKENS)]


@app.command("families")
def main(
    folder: Annotated[
        Path, typer.Argument(help="A folder of checkpoints in bf16, one of each family.", exists=True, file_okay=False)
    ],
    seed: Annotated[int, typer.Option(min=0, help="Of the texts.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.", dir_okay=False)] = None,
) -> None:
    """Count greedy picks that differ from transformers' eager bf16, per 1,000 random tokens of each model."""
    require_worker_extra()
    report.check_output(output)
    console = report.new_console()
    folders = sorted(path.parent for path in folder.glob("*/config.json"))
    with report.Progress(console).running("measuring", len(folders)) as tick:
        found: list[Agreement] = []
        for each in folders:
            found.append(measure(each, random_texts(each, seed)))
            tick(each.name)
    titles = ("near ties", "ours / eager", "no near tie", "ours / fp64", "eager / fp64")
    listed = report.table(f"Differing greedy picks of {NUM_TOKENS} tokens", "model", *titles)
    for each in found:
        name, _, *counts = asdict(each).values()
        listed.add_row(name, *map(str, counts))
    console.print(listed)
    report.emit(
        {
            "benchmark": "families",
            "provenance": provenance(),
            "settings": {"num_tokens": NUM_TOKENS, "text_tokens": TEXT_TOKENS, "seed": seed},
            "models": [asdict(each) for each in found],
        },
        output,
    )
