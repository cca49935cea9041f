"""Picks of the stage with the head: those of one process, and without a look at the context that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specsplit.core.tree import path_to
from specsplit.core.types import SamplingParams, SessionParams
from specsplit.sampling.sampler import Sampler
from specsplit.sampling.verify import walk
from specsplit.stages.chain.head_output import picks_of
from specsplit.stages.packet import PacketSession

VOCAB = 50
CONTEXT = [7 * place % VOCAB for place in range(90)]
TREE = [-1, 0, 0, 1, -1]
NODES = (3, 9, 4, 9, 8)
SAMPLING = {
    "greedy": SamplingParams(),
    "hot": SamplingParams(temperature=0.8, top_p=0.9),
    "biased": SamplingParams(logit_bias=((5, 4.0),)),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=1.5, repetition_penalty=1.3),
}


class Unread(list[int]):
    """Ids that may be counted, and neither be read nor copied."""

    def __getitem__(self, place: Any) -> Any:
        raise AssertionError("the context was read")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the context was copied")


@pytest.mark.parametrize("name", SAMPLING)
def test_picks_are_those_of_one_process_and_the_context_is_not_copied(name: str) -> None:
    params = SessionParams(SAMPLING[name], seed=4, prompt_length=60)
    logits = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    paths = [[], *([NODES[node] for node in path_to(TREE, leaf)] for leaf in range(len(TREE)))]
    everywhere = Sampler(params, VOCAB, torch.device("cpu")).picks(logits, CONTEXT, [0, 1, 2, 2, 3, 1], paths)
    # [rows before the packet | the last two committed tokens, of which the second is the root | nodes]
    ids = [*CONTEXT, *NODES]
    session = PacketSession(
        slot=0,
        epoch=1,
        start=len(CONTEXT) - 2,
        base_hash=1,
        hashes=tuple(range(7)),
        parents=(-1, 0, *(parent + 2 for parent in TREE)),
        token_ids=tuple(ids[-7:]),
        num_logits=6,
    )
    sampler = Sampler(params, VOCAB, torch.device("cpu"))
    given = ids if name == "penalties" else Unread(ids)
    picks, log_probs = picks_of(sampler, logits, given, session)
    assert (walk(TREE, NODES, picks), log_probs) == (walk(TREE, NODES, everywhere), ())
    assert len(picks) == len(everywhere)
