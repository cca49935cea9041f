"""A value that another thread computes meanwhile, and a garbage collector that rests for the length of a block."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from specsplit.model.loading import loading, noted
from specsplit.model.meanwhile import Meanwhile, without_collections


def test_a_value_that_is_started_is_computed_once_on_another_thread() -> None:
    threads: list[int] = []
    value = Meanwhile(lambda: threads.append(threading.get_ident()) or "done")
    value.start()
    value.start()
    assert value.result() == value.result() == "done"
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


def test_a_value_that_is_not_started_is_computed_once_when_asked_for() -> None:
    threads: list[int] = []
    value = Meanwhile(lambda: threads.append(threading.get_ident()))
    assert not threads
    value.result()
    value.start()
    value.result()
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("is_started", [True, False])
def test_what_the_function_raises_reaches_whoever_asks(*, is_started: bool) -> None:
    def fail() -> None:
        raise ValueError("broken")

    value = Meanwhile(fail)
    if is_started:
        value.start()
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            value.result()


def test_the_collector_rests_in_a_block_and_stays_off_if_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), without_collections():  # noqa: PT011, PT012 - the block's own
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def loaded_and_dropped(num_weights: int) -> weakref.ref[torch.nn.Module]:
    """Return what tells whether a model that was loaded and dropped is still there."""
    with loading(torch.device("cpu")):
        module: torch.nn.Module = noted(torch.nn.Linear(num_weights, 1, bias=False))
        module.register_forward_hook(module.__call__)  # a reference cycle, as those of a loaded model
        return weakref.ref(module)


def test_a_load_frees_the_model_before_it_that_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with without_collections():
        dropped = loaded_and_dropped(1)
        with loading(torch.device("cuda")):  # a command that loads its models has switched collections off
            assert dropped() is not None
    with loading(torch.device("cuda")):
        assert dropped() is None
    assert emptied == [True]


def test_small_dropped_models_are_freed_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsplit.model.loading.loaded_bytes", weakref.WeakKeyDictionary())  # not those of other tests
    monkeypatch.setattr("specsplit.model.loading.MOST_LEFT_BYTES", 3 * 4_000)
    automatic = gc.get_threshold()
    gc.set_threshold(0)
    try:
        dropped = [loaded_and_dropped(1_000) for _ in range(3)]
        assert None not in [each() for each in dropped]
        with loading(torch.device("cpu")):
            assert [each() for each in dropped] == [None] * 3
    finally:
        gc.set_threshold(*automatic)
