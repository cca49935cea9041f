"""A target that changes its numerics in the middle of a text: the text goes on, and its promise is taken back.

What the targets compute is the same here whatever they say, so the text is always that of one target.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.errors import PeerMismatch, WorkerUnreachable
from specsplit.core.exactness import Exactness
from specsplit.core.types import Identity, Proposal, SessionParams, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.speculation.options import Speculation
from tests.support.fakes import FakeDraft, FakeTarget, FakeTokenizer, plain_tokens

REQUEST = Request(prompt_ids=tuple(b"once upon"), max_new_tokens=96, seed=3, ignore_eos=True)
MODES = ("plain", "pingpong", "stream")


class Revised(FakeTarget):
    """A target whose identity can be exchanged, with its slots lost, or whose stages change under it."""

    def __init__(self, exactness: Exactness = "bits", numerics: str = "abc") -> None:
        super().__init__()
        self.said: dict[str, Any] = {"exactness": exactness, "numerics": numerics}
        self.revision = 0

    def become(self, **said: Any) -> None:
        self.said |= said
        self.slots.clear()

    async def ping(self) -> Identity:
        return replace(await super().ping(), **self.said, revision=self.revision)

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        return replace(await super().verify(turn, proposal), revision=self.revision)


async def generate(target: FakeTarget, mode: Any = "plain", change: Callable[[], object] = int) -> Result:
    """Generate in a mode; `change` is called after the fourth round."""
    speculation = Speculation(mode=mode, lookup=False, nodes=4, depth=2, branching=2)
    draft = FakeDraft() if mode != "plain" else None
    owner = Orchestrator(target, draft, FakeTokenizer(), speculation, retry_policy=RetryPolicy(draft_s=5.0))
    result, number = None, 0
    async with aclosing(owner.stream(REQUEST)) as chunks:
        async for chunk in chunks:
            result, number = chunk.result, number + 1
            if number == 4:
                change()
    assert result is not None
    assert list(result.token_ids) == plain_tokens(SessionParams(seed=3), REQUEST.prompt_ids, REQUEST.max_new_tokens)
    return result


def told(result: Result) -> tuple[str, str, bool]:
    """Return exactness, numerics, and whether a reason is given."""
    published = result.to_dict()
    assert (published["exactness"], published["numerics"]) == (result.exactness, result.numerics)
    assert published["exactness_reason"] == result.exactness_reason
    return result.exactness, result.numerics, result.exactness_reason != ""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exactness", ["bits", "near ties"])
async def test_a_text_by_one_target_is_as_exact_as_that_target(mode: str, exactness: Exactness):
    assert told(await generate(Revised(exactness), mode)) == (exactness, "abc", False)


async def test_a_target_that_says_nothing_promises_nothing():
    assert told(await generate(FakeTarget())) == ("near ties", "", False)


@pytest.mark.parametrize("mode", MODES)
async def test_a_target_that_restarts_with_the_same_numerics_keeps_its_promise(mode: str):
    target = Revised()
    result = await generate(target, mode, target.become)
    assert told(result) == ("bits", "abc", False)
    assert result.resyncs, "it lost what it held"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("said", [{"numerics": "def"}, {"numerics": ""}, {"exactness": "near ties"}])
async def test_a_target_replaced_by_one_with_other_numerics_takes_it_back(mode: str, said: dict[str, Any]):
    target = Revised()
    result = await generate(target, mode, lambda: target.become(**said))
    assert told(result) == ("near ties", "abc" if "exactness" in said else "", True)
    now = f"{target.said['exactness']}, numerics {target.said['numerics'] or 'unknown'}"
    assert result.exactness_reason == (
        "In the middle of the text the target or a stage of it was replaced by one with other numerics "
        f"(bits, numerics abc; then {now}), so the text may differ from plain decoding at near ties."
    )
    assert (await generate(target)).exactness_reason == "", "a text that begins with it was promised nothing else"


async def test_a_promise_that_was_never_made_is_not_taken_back():
    target = Revised("near ties")
    assert told(await generate(target, "plain", lambda: target.become(numerics="def"))) == ("near ties", "", False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_revisions", [1, 2])
async def test_stages_that_change_under_a_text_take_it_back(mode: str, num_revisions: int):
    """Even if the last identity is that of the beginning again: the tokens between were of other numerics."""
    target = Revised()

    def revise() -> None:
        target.revision += num_revisions

    result = await generate(target, mode, revise)
    assert told(result) == ("near ties", "", True)
    assert "a stage of it was replaced" in result.exactness_reason
    assert told(await generate(target, mode)) == ("bits", "abc", False), "a new text has one again"


@pytest.mark.parametrize("mode", MODES)
async def test_a_target_replaced_before_the_first_token_is_found_out(mode: str):
    target = Revised()
    verify, num_calls = target.verify, 0

    async def fail_once(turn: Turn, proposal: Proposal) -> Verdict:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            target.become(**change)
            raise WorkerUnreachable("gone")
        return await verify(turn, proposal)

    target.verify = fail_once  # type: ignore[method-assign]
    change: dict[str, Any] = {"numerics": "def"}
    assert told(await generate(target, mode)) == ("near ties", "", True)
    num_calls, change = 0, {"weights_hash": "other"}
    with pytest.raises(PeerMismatch, match="replaced by another model"):
        await generate(target, mode)
