"""A draft and a target on two devices: each computes on a thread of its own, with as many OpenMP threads as suit it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from specsplit.assembly.local import local_workers
from specsplit.assembly.models import Models
from specsplit.model.loader import LoadedModel
from specsplit.model.threads import engine_threads
from tests.support.hash_model import LetterTokenizer, hash_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


def model_on(device: torch.device, role: Any) -> LoadedModel:
    """Return a model that says that it is on `device`; nothing is computed there."""
    model = replace(hash_model(role)[0], tokenizer=LetterTokenizer())
    model.runner.device = device  # type: ignore[misc]
    return model


@pytest.mark.parametrize(
    ("of_target", "of_draft", "has_own"),
    [(CPU, CPU, False), (CPU, GPU, True), (GPU, CPU, True), (torch.device("cuda"), torch.device("cuda:0"), False)],
    ids=str,
)
async def test_a_cpu_beside_a_gpu_has_a_thread_of_its_own(
    of_target: torch.device, of_draft: torch.device, has_own: bool
) -> None:
    async with local_workers(Models(model_on(of_target, "target"), model_on(of_draft, "draft"))) as workers:
        names = {thread.name for thread in threading.enumerate()}
        assert ({"specsplit-target", "specsplit-draft"} <= names) == has_own
        assert workers.placement.is_on_loop != has_own


@pytest.mark.parametrize("asked", [None, 1, 8])
def test_a_gpu_has_one_thread_whatever_is_asked(asked: int | None) -> None:
    assert engine_threads(CPU, asked) == asked
    assert engine_threads(GPU, asked) == 1
