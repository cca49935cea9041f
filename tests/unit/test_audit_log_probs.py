"""Log-probabilities that another target recomputes: who answers others is found, and honest targets never are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import WrongResult
from specsplit.core.types import Identity, Proposal, TokenLogProb, Turn, Verdict
from specsplit.orchestrator.replicas import Auditing
from tests.support.audits import NUM_PROMPT, REQUEST, TREES, Scripted, generate, made, quarantined, truth
from tests.support.fakes import FakeTarget

LOGPROBS = replace(REQUEST, logprobs=2)


class Promising(FakeTarget):
    """A target that may promise bits."""

    def __init__(self, *, is_bits: bool = False) -> None:
        super().__init__()
        self._is_bits = is_bits

    async def ping(self) -> Identity:
        said = await super().ping()
        return replace(said, exactness="bits", numerics="abc") if self._is_bits else said


class Vague(Promising):
    """A target that picks what it should, and answers other log-probabilities at one position."""

    def __init__(self, position: int, change: Callable[[TokenLogProb], TokenLogProb], *, is_bits: bool = False) -> None:
        super().__init__(is_bits=is_bits)
        self._position, self._change = NUM_PROMPT + position, change

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        true = await super().verify(turn, proposal)
        at = self._position - (true.length - len(true.accepted))
        if not 0 <= at < len(true.log_probs):
            return true
        changed = (*true.log_probs[:at], self._change(true.log_probs[at]), *true.log_probs[at + 1 :])
        return replace(true, log_probs=changed)


def less_likely(by: float) -> Callable[[TokenLogProb], TokenLogProb]:
    return lambda token: replace(token, log_prob=token.log_prob - by)


def other_tokens(token: TokenLogProb) -> TokenLogProb:
    """Name other tokens as the likeliest ones, at the same values."""
    return replace(token, top=tuple(((token_id + 1) % 256, value) for token_id, value in token.top))


def fewer_tokens(token: TokenLogProb) -> TokenLogProb:
    return replace(token, top=token.top[:-1])


@pytest.mark.parametrize("mode", TREES)
@pytest.mark.parametrize("change", [less_likely(0.01), less_likely(-0.01), other_tokens, fewer_tokens])
def test_a_liar_in_log_probabilities_alone_is_found(
    mode: Mode, change: Callable[[TokenLogProb], TokenLogProb], caplog: pytest.LogCaptureFixture
) -> None:
    true, _ = asyncio.run(generate(made(FakeTarget(), mode=mode), LOGPROBS))
    targets = [Vague(9, change), FakeTarget(), FakeTarget()]
    result, audit = asyncio.run(generate(made(*targets, mode=mode), LOGPROBS))
    assert (result.token_ids, result.logprobs) == (true.token_ids, true.logprobs)
    assert quarantined(caplog) == ["target-0"]
    assert (audit.num_mismatches, audit.num_tokens) == (1, 24)
    assert "others find other log-probabilities at position 18" in caplog.text


@pytest.mark.parametrize("mode", TREES)
@pytest.mark.parametrize("by", [0.0011, -0.0011])
def test_a_target_that_errs_too_little_for_another_pick_is_found(
    mode: Mode, by: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the request asks for no log-probabilities, and then shows none."""
    result, audit = asyncio.run(generate(made(Vague(9, less_likely(by)), FakeTarget(), FakeTarget(), mode=mode)))
    assert (result.token_ids, result.logprobs) == (truth(), ())
    assert quarantined(caplog) == ["target-0"]
    assert (audit.num_mismatches, audit.num_ties, audit.num_tokens) == (1, 0, 24)


def test_an_auditor_that_lies_in_log_probabilities_is_found(caplog: pytest.LogCaptureFixture) -> None:
    targets = [FakeTarget(), Vague(9, less_likely(1.0)), FakeTarget()]
    result, audit = asyncio.run(generate(made(*targets), LOGPROBS))
    assert result.token_ids == truth()
    assert quarantined(caplog) == ["target-1"]
    assert audit.num_mismatches == 1


def test_log_probabilities_that_were_shown_before_an_audit_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    auditing = Auditing(0.5, rng=Scripted(3, 10))
    orchestrator = made(Vague(6, less_likely(0.1)), FakeTarget(), FakeTarget(), auditing=auditing)
    with pytest.raises(WrongResult, match="target-0 was found to compute wrong results, and token 7 of"):
        asyncio.run(orchestrator.generate(LOGPROBS))
    assert quarantined(caplog) == ["target-0"]


@pytest.mark.parametrize(
    ("by", "is_bits", "is_found"), [(0.0009, False, False), (0.0009, True, True), (0.0, True, False)]
)
def test_log_probabilities_differ_by_arithmetic_where_bits_may(
    by: float, is_bits: bool, is_found: bool, caplog: pytest.LogCaptureFixture
) -> None:
    targets = Vague(9, less_likely(by), is_bits=is_bits), *(Promising(is_bits=is_bits) for _ in range(2))
    _, audit = asyncio.run(generate(made(*targets), LOGPROBS))
    assert audit.num_mismatches == int(is_found)
    assert quarantined(caplog) == ["target-0"] * is_found


def test_an_auditor_without_log_probabilities_cannot_audit_them(caplog: pytest.LogCaptureFixture) -> None:
    class Old(FakeTarget):
        async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
            return replace(await super().verify(turn, proposal), log_probs=())

    caplog.set_level(logging.INFO)
    _, audit = asyncio.run(generate(made(FakeTarget(), auditing=Auditing(1.0, ("judge", Old()))), LOGPROBS))
    assert (audit.num_rounds, audit.num_missed) == (0, 24)
    assert "the target at judge could not audit a round: The target answered no log-probabilities" in caplog.text
