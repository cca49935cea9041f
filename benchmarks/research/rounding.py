"""Measures what rounding a target's weights costs: its loss on human text, and how often it picks the same next token.

Every format reads the same prompts in one forward each; the first format is the one that the others are held against.
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
from benchmarks.workloads import CODE, HELD_OUT, load
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidRequest
from specsplit.model.extra import require_worker_extra

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quality:
    """One format's figures."""

    dtype: str
    nats_per_token: float
    same_of_1000: float
    """Tokens of a thousand after which both formats find the same token likeliest."""
    divergence: float
    """Kullback-Leibler divergence of the format's distribution from the first one's, in nats per token."""
    weight_bytes: int
    num_tokens: int


def measure(target: str, dtypes: Sequence[str], texts: Sequence[str], tick: Any) -> list[Quality]:
    """Return the figures of each format; tokens beyond the context are left out."""
    from specsplit.model.attention.metadata import SequenceInput
    from specsplit.model.loader import load_model

    found: list[Quality] = []
    first: list[Tensor] = []
    for dtype in dtypes:
        model = load_model(target, role="target", dtype=dtype, record=False)
        if model.tokenizer is None:
            raise InvalidRequest(f"{target} has no tokenizer to read the prompts with.")
        rows: list[Tensor] = []
        nats = num_tokens = 0.0
        for text in texts:
            token_ids = model.tokenizer.encode(text)[: model.context]
            logits = model.runner.forward([SequenceInput(0, 0, token_ids, num_logits=len(token_ids))])[0]
            rows.append(logits[:-1].log_softmax(-1))
            nats -= rows[-1].gather(1, logits.new_tensor(token_ids[1:]).long()[:, None]).sum().item()
            num_tokens += len(token_ids) - 1
            tick(f"{dtype}, {len(rows)} prompts")
        first = first or rows
        same = sum((one.argmax(-1) == other.argmax(-1)).sum().item() for one, other in zip(first, rows, strict=True))
        apart = sum((one.exp() * (one - other)).sum().item() for one, other in zip(first, rows, strict=True))
        figures = nats / num_tokens, 1000 * same / num_tokens, apart / num_tokens
        found.append(Quality(dtype, *figures, model.weight_bytes, int(num_tokens)))
    return found


@app.command("rounding")
def main(
    target: Annotated[str, typer.Option(help="The model whose weights are rounded.")] = EMBEDDED,
    dtypes: Annotated[
        str, typer.Option(help="Formats, the one that others are held against first.")
    ] = "fp32,int8,int4",
    prompts: Annotated[int | None, typer.Option(min=1, help="At most so many of each kind; all by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line to this file.")] = None,
) -> None:
    """Measure what rounding weights to fewer bits costs in quality."""
    require_worker_extra()
    report.check_output(output)
    console = report.new_console()
    # A prompt may be in both.
    texts = list(dict.fromkeys(prompt.text for kind in (CODE, HELD_OUT) for prompt in load(kind, prompts)))
    formats = dtypes.split(",")
    with report.Progress(console).running("measuring", len(formats) * len(texts)) as tick:
        found = measure(target, formats, texts, tick)
    listed = report.table(
        f"{found[0].num_tokens} tokens", "format", "nats per token", "same of 1,000", "divergence", "weights MB"
    )
    for each in found:
        figures = f"{each.nats_per_token:.4f}", f"{each.same_of_1000:.1f}", f"{each.divergence:.5f}"
        listed.add_row(each.dtype, *figures, f"{each.weight_bytes / 1e6:.1f}")
    console.print(listed)
    report.emit(
        {
            "benchmark": "rounding",
            "provenance": provenance(),
            "settings": {"target": Path(target).name, "prompts": prompts},
            "formats": [asdict(each) for each in found],
        },
        output,
    )
