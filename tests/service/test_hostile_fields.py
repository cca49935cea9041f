"""Workers that lie about one field of their answers, whichever it is: the text is unharmed, or one sentence ends it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from specsplit.core.defaults import Mode
from specsplit.core.errors import SpecSplitError
from specsplit.core.ports import Drafter, Verifier
from specsplit.core.types import SessionParams
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import Request, Result, RetryPolicy
from specsplit.rpc.pb import common_pb2, draft_pb2, stage_pb2, target_pb2
from specsplit.rpc.server import Service, serving
from specsplit.rpc.servicers import DraftService, TargetService
from specsplit.speculation.options import Speculation
from specsplit.stages.wire.servicer import StageService
from tests.support.fakes import VOCAB_SIZE, FakeDraft, FakeTarget, Faults, plain_tokens
from tests.support.language import FakeTokenizer
from tests.support.lies import Lie, LyingService, lies_about
from tests.support.remote_chains import opened_remote
from tests.support.rounds import plain_text
from tests.support.rpc_servers import LOOPBACK, drafter_at, verifier_at
from tests.support.small_target import PARAMS, PROMPT, TEXT_LENGTH, shards, truth

SENTENCE_S = 60.0
"""A request is over by then, on a busy machine too."""
TIMEOUT_S = 1.0
"""Deadline of a request to a target that lies: until then it is asked again."""
AT_ONCE = 5
"""Targets that lie at the same time."""
MOST_BYTES = 256 << 20
"""Growth of this process, which is both ends, over all lies of a test."""
PROMPT_IDS = tuple(b"once upon a time")
NUM_TOKENS = 24
TRUTH = tuple(plain_tokens(SessionParams(seed=1), PROMPT_IDS, NUM_TOKENS))
PING = lies_about("Ping", common_pb2.PingResponse)
DRAFT = lies_about("GenerateDrafts", draft_pb2.GenerateDraftsResponse)
VERDICT = lies_about("VerifyDrafts", target_pb2.VerifyDraftsResponse)
COMMIT = lies_about("VerifyStream", target_pb2.VerifyStreamResponse)
SCORE = lies_about("Score", target_pb2.ScoreResponse)
TOKENIZER = lies_about("GetTokenizer", target_pb2.GetTokenizerResponse)
STAGE = [
    *lies_about("Configure", stage_pb2.ConfigureResponse),
    *lies_about("Forward", stage_pb2.Frame),
    *lies_about("Ping", stage_pb2.StagePingResponse),
]
IS_THE_TEXT = ("token_ids",)
"""Fields with which a target picks another bonus token, which only an audit can find."""


def some(lies: Sequence[Lie], count: int) -> list[Lie]:
    """Return so many lies, the same ones each time."""
    return random.Random(count).sample(lies, count)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def check_sentence(error: BaseException, lie: Lie) -> None:
    assert isinstance(error, SpecSplitError), (str(lie), error)
    words = str(error)
    assert words, str(lie)
    assert words.isprintable(), (str(lie), words)
    assert len(words) <= 1200, (str(lie), words)


async def outcome_of(
    target: Verifier, draft: Drafter | None, mode: Mode, timeout_s: float | None = None
) -> Result | BaseException:
    """Generate a text over workers."""
    speculation = Speculation(mode=mode, lookup=False, nodes=4, depth=2, branching=2)
    orchestrator = Orchestrator(
        target, draft, FakeTokenizer(), speculation, retry_policy=RetryPolicy(retry_s=1.0, rng=random.Random(1))
    )
    request = Request(
        prompt_ids=PROMPT_IDS, max_new_tokens=NUM_TOKENS, seed=1, ignore_eos=True, timeout_s=timeout_s, logprobs=1
    )
    async with asyncio.timeout(SENTENCE_S):
        (outcome,) = await asyncio.gather(orchestrator.generate(request), return_exceptions=True)
        await orchestrator.aclose()
    return outcome


@asynccontextmanager
async def lying_target(lie: Lie) -> AsyncGenerator[tuple[Verifier, LyingService]]:
    service = LyingService(TargetService(FakeTarget()), "VerifyDrafts", lie)
    async with serving(LOOPBACK, [cast(Service, service)]) as server, verifier_at(server) as target:
        yield target, service


@pytest.mark.parametrize(
    ("mode", "lies"),
    [
        ("pingpong", some(DRAFT, 10)),
        *[pytest.param(mode, DRAFT, marks=pytest.mark.slow) for mode in ("pingpong", "overlap", "stream", "auto")],
    ],
)
async def test_a_draft_that_lies_about_a_field_harms_no_text(mode: Mode, lies: Sequence[Lie]) -> None:
    before, num_told = resident_bytes(), 0
    for lie in lies:
        service = LyingService(DraftService(FakeDraft()), "GenerateDrafts", lie)
        async with serving(LOOPBACK, [cast(Service, service)]) as server, drafter_at(server) as draft:
            outcome = await outcome_of(FakeTarget(Faults(pauses=30)), draft, mode)  # as slow as to need the draft
        assert isinstance(outcome, Result), (str(lie), outcome)
        assert outcome.token_ids == TRUTH, str(lie)
        num_told += service.num_told
    assert num_told > len(lies)
    assert resident_bytes() - before < MOST_BYTES


@pytest.mark.parametrize("lies", [some(PING, 6), pytest.param(PING, marks=pytest.mark.slow)])
async def test_a_draft_that_lies_about_who_it_is_is_refused_or_harmless(lies: Sequence[Lie]) -> None:
    for lie in lies:
        service = LyingService(DraftService(FakeDraft()), "GenerateDrafts", lie)
        async with serving(LOOPBACK, [cast(Service, service)]) as server, drafter_at(server) as draft:
            outcome = await outcome_of(FakeTarget(), draft, "pingpong")
        if isinstance(outcome, Result):
            assert outcome.token_ids == TRUTH, str(lie)
        else:
            check_sentence(outcome, lie)


@pytest.mark.parametrize(
    ("mode", "lies"),
    [
        ("pingpong", some([*VERDICT, *PING], 10)),
        ("stream", some(COMMIT, 10)),
        pytest.param("pingpong", [*VERDICT, *PING], marks=pytest.mark.slow),
        pytest.param("stream", COMMIT, marks=pytest.mark.slow),
    ],
)
async def test_a_target_that_lies_about_a_field_is_harmless_or_one_sentence(mode: Mode, lies: Sequence[Lie]) -> None:
    async def told(lie: Lie) -> int:
        """Check a text over a target that tells this lie; return how often it did."""
        async with lying_target(lie) as (target, service):
            outcome = await outcome_of(target, None if mode == "plain" else FakeDraft(), mode, TIMEOUT_S)
        if isinstance(outcome, Result):
            assert len(outcome.token_ids) <= NUM_TOKENS, str(lie)
            assert all(token_id < VOCAB_SIZE for token_id in outcome.token_ids), str(lie)
            assert outcome.token_ids == TRUTH or lie.path[-1] in IS_THE_TEXT, str(lie)
        else:
            check_sentence(outcome, lie)
        return service.num_told

    before, num_told = resident_bytes(), 0
    for first in range(0, len(lies), AT_ONCE):  # together, since most of them have their target asked to the deadline
        num_told += sum(await asyncio.gather(*map(told, lies[first : first + AT_ONCE])))
    assert num_told > 0
    assert resident_bytes() - before < MOST_BYTES


@pytest.mark.parametrize(
    "lies", [some([*SCORE, *TOKENIZER], 10), pytest.param([*SCORE, *TOKENIZER], marks=pytest.mark.slow)]
)
async def test_scores_and_tokenizers_that_lie_are_whole_or_one_sentence(lies: Sequence[Lie]) -> None:
    for lie in lies:
        async with lying_target(lie) as (target, _):
            try:
                await target.ping()
                scores = await target.score(PROMPT_IDS, [1, 2, 3], top_logprobs=2)
                files = await target.tokenizer_files()
            except SpecSplitError as error:
                check_sentence(error, lie)
            else:
                assert [len(token.top) for token in scores.tokens] == [2] * 3, str(lie)
                assert all(other < VOCAB_SIZE for token in scores.tokens for other, _ in token.top), str(lie)
                assert files.hash.isprintable(), str(lie)


@pytest.mark.parametrize("lies", [some(STAGE, 6), pytest.param(STAGE, marks=pytest.mark.slow)])
async def test_stages_that_lie_about_a_field_harm_no_text(lies: Sequence[Lie], monkeypatch: pytest.MonkeyPatch) -> None:
    text, before, told = await asyncio.to_thread(truth), resident_bytes(), list[LyingService]()
    parts = await asyncio.to_thread(shards)
    for lie in lies:

        def made(stage: Any, lie: Lie = lie, **options: Any) -> Any:
            told.append(LyingService(StageService(stage, **options), lie=lie))
            return told[-1]

        monkeypatch.setattr("tests.support.remote_chains.StageService", made)
        try:
            async with asyncio.timeout(SENTENCE_S), AsyncExitStack() as stack:
                options = {"call_timeout_s": 1.0, "reconnect_s": 1.0}
                chain = await stack.enter_async_context(opened_remote(parts, link_options=options))
                assert await plain_text(chain.target, PROMPT, PARAMS, TEXT_LENGTH) == text, str(lie)
        except SpecSplitError as error:
            check_sentence(error, lie)
    assert sum(each.num_told for each in told) > len(lies) // 2
    assert resident_bytes() - before < MOST_BYTES
