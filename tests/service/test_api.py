"""The Python API on the embedded pair: the same text whichever way it is asked for, and clean ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import specsplit
from specsplit import Pipeline
from specsplit.api import RequestOptions
from specsplit.assembly.models import check_vocabularies
from specsplit.core.defaults import Mode
from specsplit.core.errors import InvalidRequest, InvalidSettings, VocabularyMismatch
from specsplit.core.settings import load_settings
from specsplit.core.types import Identity
from tests.support.processes import environment

PROMPT = "def add(a, b):"
MODES: list[Mode] = ["auto", "plain", "lookup", "pingpong", "overlap", "stream"]
MIXED: list[tuple[str, RequestOptions]] = [
    (
        f"class Number{number}:\n    " + "# a longer prompt than the one before\n    " * number,
        RequestOptions(
            max_new_tokens=8 + 5 * (number % 4),
            temperature=number % 3 / 2,
            seed=number,
            mode=MODES[number % len(MODES)],
            ignore_eos=True,
        ),
    )
    for number in range(16)
]
"""Requests of different lengths, temperatures, seeds and modes."""


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with Pipeline(max_new_tokens=16, sessions=4) as opened:
        yield opened


def test_the_package_shows_the_pipeline_and_its_version():
    assert specsplit.Pipeline is Pipeline
    assert isinstance(specsplit.__version__, str)
    assert {"Pipeline", "__version__"} <= set(specsplit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        _ = specsplit.Pipelines  # pyright: ignore[reportAttributeAccessIssue]


def test_generate_and_stream_give_the_same_text(pipeline: Pipeline):
    result = pipeline.generate(PROMPT, temperature=0.8, seed=3)
    chunks = list(pipeline.stream(PROMPT, temperature=0.8, seed=3))
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert len(chunks) > 1
    assert chunks[-1].result is not None
    assert chunks[-1].result.token_ids == result.token_ids
    assert (len(result.token_ids), result.seed, result.mode) == (16, 3, "auto")


async def test_the_async_variants_give_the_same_text_and_leave_the_loop_free(pipeline: Pipeline):
    expected = pipeline.generate(PROMPT)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    result, streamed = await asyncio.gather(pipeline.agenerate(PROMPT), _collect(pipeline))
    ticking.cancel()
    assert (result.text, streamed) == (expected.text, expected.text)
    assert ticks > 2


async def _collect(pipeline: Pipeline) -> str:
    return "".join([chunk.text async for chunk in pipeline.astream(PROMPT)])


def test_a_result_is_printed_as_its_text(pipeline: Pipeline):
    result = pipeline.generate(PROMPT)
    assert str(result) == f"{result}" == result.text != ""


def test_plain_decoding_gives_the_same_text(pipeline: Pipeline):
    plain = pipeline.generate(PROMPT, mode="plain")
    assert (plain.mode, plain.draft_forwards, plain.target_forwards) == ("plain", 0, 16)
    assert plain.token_ids == pipeline.generate(PROMPT).token_ids


def test_a_chat_with_the_embedded_pair_is_a_text_to_go_on_with(pipeline: Pipeline):
    assert pipeline.generate(PROMPT, chat=True).token_ids == pipeline.generate(PROMPT).token_ids


def test_options_of_a_request_go_over_those_of_the_pipeline(pipeline: Pipeline):
    assert len(pipeline.generate(PROMPT, max_new_tokens=3).token_ids) == 3
    whole = pipeline.generate(PROMPT).text
    stop = whole[5:9]
    assert pipeline.generate(PROMPT, stop=stop).text == whole[: whole.index(stop)]
    ids = pipeline.generate(PROMPT).prompt_token_ids
    assert pipeline.generate(ids).text == whole
    banned = pipeline.generate(PROMPT).token_ids[0]
    assert pipeline.generate(PROMPT, logit_bias={banned: -100.0}).token_ids[0] != banned


@pytest.fixture(scope="module")
def alone(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """The tokens of every one of the `MIXED` requests, with no other beside it."""
    return [pipeline.generate(prompt, **options).token_ids for prompt, options in MIXED]


@pytest.mark.parametrize("count", [2, 7, pytest.param(16, marks=pytest.mark.slow)])
async def test_requests_at_once_give_the_texts_that_each_gives_alone(
    count: int, pipeline: Pipeline, alone: list[tuple[int, ...]]
):
    with ThreadPoolExecutor(count) as threads:
        shared = [threads.submit(pipeline.generate, prompt, **options) for prompt, options in MIXED[:count]]
        results = [future.result() for future in shared]
    assert [result.token_ids for result in results] == alone[:count]
    results = await asyncio.gather(*(pipeline.agenerate(prompt, **options) for prompt, options in MIXED[:count]))
    assert [result.token_ids for result in results] == alone[:count]


async def test_a_list_of_prompts_has_its_answers_in_order(pipeline: Pipeline):
    texts = [f"{PROMPT}{' ' * length}" for length in range(6)]
    alone = [pipeline.generate(text, temperature=0.9, seed=5) for text in texts]
    together = pipeline.generate(texts, temperature=0.9, seed=5)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    ids = [result.prompt_token_ids for result in alone[:2]]
    for answers in (pipeline.generate(ids), await pipeline.agenerate(ids)):
        assert [result.prompt_token_ids for result in answers] == ids
    assert len(pipeline.generate(texts[:1])) == 1


async def test_the_first_error_in_a_list_is_raised_after_all_have_ended(pipeline: Pipeline):
    prompts = [PROMPT, [4096], [1] * 9000]
    before = pipeline.generate(PROMPT)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        pipeline.generate(prompts)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await pipeline.agenerate(prompts)
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        pipeline.generate([PROMPT, ""])
    assert pipeline.generate(PROMPT).token_ids == before.token_ids


async def test_one_of_many_that_is_cancelled_leaves_the_others_alone(pipeline: Pipeline, alone: list[tuple[int, ...]]):
    endless = [
        asyncio.create_task(pipeline.agenerate(PROMPT, max_new_tokens=3000, ignore_eos=True, mode=mode))
        for mode in ("plain", "pingpong", "stream")
    ]
    others = [asyncio.create_task(pipeline.agenerate(prompt, **options)) for prompt, options in MIXED[:5]]
    # Only one slot is left beside the endless ones, so the first answer comes while all three still run.
    await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    assert not any(task.done() for task in endless)
    for task in endless:
        task.cancel()
    results = await asyncio.gather(*others)
    assert [result.token_ids for result in results] == alone[:5]


def test_log_probabilities_come_with_the_tokens_if_asked_for(pipeline: Pipeline):
    chunks = list(pipeline.stream(PROMPT, logprobs=2))
    result = chunks[-1].result
    assert result is not None
    assert [token for chunk in chunks for token in chunk.logprobs] == list(result.logprobs)
    published = result.to_dict()["logprobs"]
    assert isinstance(published, list)
    assert [entry["token_id"] for entry in published] == list(result.token_ids)  # type: ignore[index, call-overload]
    for token_id, token in zip(result.token_ids, result.logprobs, strict=True):
        assert len(token.top) == 2
        assert token.top[0] == (token_id, token.log_prob)
    assert "logprobs" not in pipeline.generate(PROMPT).to_dict()
    with pytest.raises(InvalidSettings, match="logprobs"):
        pipeline.generate(PROMPT, logprobs=21)


def test_without_a_seed_one_is_drawn_and_repeats_the_text(pipeline: Pipeline):
    first = pipeline.generate(PROMPT, temperature=1.0)
    second = pipeline.generate(PROMPT, temperature=1.0)
    assert first.seed != second.seed
    assert pipeline.generate(PROMPT, temperature=1.0, seed=first.seed).token_ids == first.token_ids


def test_a_stream_closed_early_frees_the_slot_for_the_next_request(pipeline: Pipeline):
    stream = pipeline.stream(PROMPT, max_new_tokens=2000, ignore_eos=True)
    next(stream)
    stream.close()
    assert len(pipeline.generate(PROMPT).token_ids) == 16


async def test_an_async_stream_closed_or_cancelled_early_frees_the_slot_too(pipeline: Pipeline):
    stream = pipeline.astream(PROMPT, max_new_tokens=2000, ignore_eos=True)
    await anext(stream)
    await stream.aclose()
    endless = asyncio.create_task(pipeline.agenerate(PROMPT, max_new_tokens=2000, ignore_eos=True))
    await asyncio.sleep(0)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert len((await pipeline.agenerate(PROMPT)).token_ids) == 16


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "The prompt is empty"),
        ([], {}, "The prompt is empty"),
        ([4096], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([1] * 9000, {}, r"leaves no room.*`--context N`, or `context=N` in Python"),
        ("a", {"temperature": -1}, "temperature must be between"),
        ("a", {"seed": 2**64}, "seed must be below"),
        ("a", {"temprature": 1}, "the nearest one is temperature"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be"),
    ],
)
def test_a_wrong_request_is_refused_and_the_pipeline_goes_on(
    prompt: str | list[int], options: dict[str, float], message: str, pipeline: Pipeline
):
    with pytest.raises((InvalidRequest, InvalidSettings), match=message):
        pipeline.generate(prompt, **options)  # pyright: ignore[reportArgumentType]
    assert len(pipeline.generate(PROMPT, max_new_tokens=1).token_ids) == 1


def test_a_wrong_setting_is_refused_before_anything_is_loaded():
    with pytest.raises(InvalidSettings, match=r"^There is no setting modle; the nearest one is mode\.$"):
        Pipeline(modle="plain")  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidRequest, match="top_p"):
        Pipeline(top_p=0)


def test_closing_ends_what_is_under_way_and_every_thread():
    before = set(threading.enumerate())
    pipeline = Pipeline.from_settings(load_settings({"mode": "plain"}).settings)
    streams = [pipeline.stream(PROMPT, max_new_tokens=2000, ignore_eos=True) for _ in range(3)]
    for stream in streams:
        next(stream)
    pipeline.close()
    pipeline.close()
    for stream in streams:
        with pytest.raises(InvalidRequest, match="closed before this request came to its end"):
            list(stream)
    assert set(threading.enumerate()) <= before
    with pytest.raises(InvalidRequest, match="closed"):
        pipeline.generate(PROMPT)


UNCLOSED = """
import atexit, threading
atexit.register(lambda: print([each.name for each in threading.enumerate() if each.name.startswith("specsplit")]))
from specsplit import Pipeline
pipeline = Pipeline(threads=1, sessions=1, mode="overlap")
stream = pipeline.stream("def add(a, b):", max_new_tokens=4000, ignore_eos=True)
next(stream)
"""
"""It prints the threads that are left at the very end: callbacks run in the reverse of their order."""


def test_a_script_that_closes_nothing_ends_with_all_closed():
    command = [sys.executable, "-c", UNCLOSED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_stream_made_before_the_end_and_begun_after_it_says_so():
    pipeline = Pipeline(mode="plain")
    stream, later = pipeline.stream(PROMPT), pipeline.astream(PROMPT)
    pipeline.close()
    with pytest.raises(InvalidRequest, match="This pipeline is closed"):
        next(stream)
    with pytest.raises(InvalidRequest, match="This pipeline is closed"):
        asyncio.run(anext(later))


def test_closing_as_requests_begin_gives_each_an_answer_or_a_reason():
    pipeline = Pipeline(mode="plain", max_new_tokens=2)
    gate = threading.Barrier(9)
    outcomes: list[str] = []

    def generate() -> None:
        gate.wait()
        try:
            for _ in range(20):
                pipeline.generate(PROMPT)
            outcomes.append("done")
        except InvalidRequest as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=generate, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.wait()
    pipeline.close()
    for thread in threads:
        thread.join(timeout=60)
    assert len(outcomes) == 8
    assert all(outcome == "done" or "closed" in outcome for outcome in outcomes)


def test_other_vocabularies_are_refused_naming_both_models():
    target = Identity(role="target", model="large", vocab_size=8, vocab_hash="a", context=16, max_nodes=8)
    draft = Identity(role="draft", model="small", vocab_size=8, vocab_hash="b", context=16, max_nodes=8)
    with pytest.raises(VocabularyMismatch, match=r"draft small and the target large .*--draft-model"):
        check_vocabularies(target, draft)
