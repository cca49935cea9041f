"""The stage after a sitting that went on from a pair: weights between where it began and where it came to."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from benchmarks.research.train_pair import model, stages
from benchmarks.research.train_pair.stages import Run
from specsplit.core.errors import InvalidSettings


def settle(run: Run, shares: dict[str, float]) -> None:
    """Replace "target" and "draft" by (1 - share) of their first weights and `share` of their last, and note it.

    Raises:
        InvalidSettings: a model did not go on from another one, is not trained yet, or has been settled before.
    """
    space, record = run.space, run.space.record()
    for name in shares:
        begun, folder = space.root / "start" / name, space.pair / name
        space.require(begun / "model.safetensors", "grow")
        space.require(folder / "model.safetensors", name)
        if "share" in record[name]:
            raise InvalidSettings(f"The {name} in {space.root} is settled already, at {record[name]['share']}.")
    for name, share in shares.items():
        folder = space.pair / name
        mean = between(model.load(space.root / "start" / name), model.load(folder), share)
        stages.save(run, mean, folder)
        space.note(**{name: {**space.record()[name], "share": share}})
        run.tell(f"the {name} is {share:g} of what the sitting came to, and the rest of what it began with")


@torch.no_grad()
def between(begun: LlamaForCausalLM, ended: LlamaForCausalLM, share: float) -> LlamaForCausalLM:
    """Return the second model with weights (1 - share) * begun + share * ended (Wortsman et al. 2022)."""
    for first, last in zip(begun.parameters(), ended.parameters(), strict=True):
        last.lerp_(first, 1 - share)
    return ended
