"""Commits that contradict the nodes which were sent: the stream is given up and the text goes on over another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specsplit.core.types import SessionParams, StreamLimits, Turn, Verdict
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result
from specsplit.speculation.options import Speculation
from specsplit.target.stream import TargetLimits, TargetStream
from tests.support.fakes import VOCAB_SIZE, FakeDraft, FakeTarget, FakeTokenizer, Faults, perfect_guess, plain_tokens
from tests.support.virtual_time import LoopClock, run_virtual

REQUEST = Request(prompt_ids=tuple(b"Once upon a time"), max_new_tokens=40, seed=7, ignore_eos=True)
TEXT = tuple(plain_tokens(SessionParams(seed=7), REQUEST.prompt_ids, 40))


def another(token_id: int) -> int:
    return (token_id + 1) % VOCAB_SIZE


LIES: dict[str, Callable[[Verdict], Verdict]] = {
    "a node without its parent": lambda commit: replace(commit, verified=commit.verified[1:]),
    "a child before its parent": lambda commit: replace(commit, verified=commit.verified[::-1]),
    "a node twice": lambda commit: replace(commit, verified=(*commit.verified, commit.verified[-1])),
    "a node that was not sent": lambda commit: replace(commit, verified=(*commit.verified, 9999)),
    "another token": lambda commit: replace(commit, token_ids=(another(commit.token_ids[0]), *commit.token_ids[1:])),
    "no path": lambda commit: replace(
        commit, accepted=commit.accepted[1:], token_ids=commit.token_ids[1:], length=commit.length - 1
    ),
}


class Liar(FakeTarget):
    """A target that lies once, about the first commit that accepts two nodes."""

    def __init__(self, lie: Callable[[Verdict], Verdict]) -> None:
        super().__init__(Faults(pauses=30))
        self.lie: Callable[[Verdict], Verdict] | None = lie

    def open_stream(self, turn: Turn, limits: StreamLimits) -> LyingStream:
        async def leave(keeps_slot: bool) -> None:
            if not keeps_slot:
                await self.close(turn.session)

        return LyingStream(self.verify, leave, turn, limits, TargetLimits(self.context, self.max_nodes), owner=self)


class LyingStream(TargetStream):
    """A stream of such a target."""

    def __init__(self, *parts: Any, owner: Liar) -> None:
        super().__init__(*parts)
        self._owner = owner

    async def next_commit(self) -> Verdict | None:
        commit, lie = await super().next_commit(), self._owner.lie
        if commit is None or lie is None or len(commit.accepted) < 2:
            return commit
        self._owner.lie = None
        return lie(commit)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_commit_that_contradicts_the_sent_nodes_is_made_again(lie: Callable[[Verdict], Verdict]) -> None:
    target = Liar(lie)

    async def main() -> Result:
        speculation = Speculation(mode="stream", lookup=False, nodes=6, depth=4, branching=1)
        owner = Orchestrator(target, FakeDraft(perfect_guess), FakeTokenizer(), speculation, LoopClock())
        result = await owner.generate(REQUEST)
        await owner.aclose()
        return result

    result = run_virtual(main)
    assert result.token_ids == TEXT
    assert target.lie is None, "it was told"
    assert [phase.reason for phase in result.degraded] == ["failed"]
