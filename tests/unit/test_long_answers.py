"""Long answers: a part at a time they are what they would be in one go, and others run meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from specsplit.gateway import long_answers
from specsplit.gateway.long_answers import to_json
from tests.support.fakes import FakeTokenizer
from tests.unit.test_text_offsets import joined, whole

ENTRIES = [{"token": f"\N{EURO SIGN}{number}", "logprob": -number / 7} for number in range(1000)]
ANSWERS: list[dict[str, Any]] = [
    {},
    {"id": "a", "choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}},
    {"choices": [{"index": 0, "text": 'a "b"\u2028', "logprobs": None, "finish_reason": "stop"}]},
    {"choices": [{"logprobs": {"content": ENTRIES[:count], "refusal": None}} for count in (0, 1, 256, 257, 1000)]},
    {
        "choices": [
            {"logprobs": {"tokens": ["a"] * 600, "top_logprobs": [None, {"a": -1.5}] * 300}, "speculative": [{}]}
        ]
    },
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
async def test_the_json_in_pieces_is_that_of_the_whole(answer: dict[str, Any]) -> None:
    assert await to_json(answer) == json.dumps(answer, ensure_ascii=False, separators=(",", ":"))


async def test_others_run_while_a_long_answer_becomes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "MAX_S", 0.0)
    making, num_turns = asyncio.create_task(to_json(ANSWERS[3])), 0
    while not making.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 1000 // long_answers.SLICE


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": [*b"ab"] * 5}], ids=str)
async def test_a_long_echo_in_slices_is_that_in_one(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prompt": "a \N{EURO SIGN}: " * 5, "echo": True, "seed": 3, **fields}
    in_one = await whole(FakeTokenizer(), **asked)
    monkeypatch.setattr(long_answers, "SLICE", 7)
    assert await whole(FakeTokenizer(), **asked) == in_one
    assert await joined(FakeTokenizer(), **asked) == in_one
