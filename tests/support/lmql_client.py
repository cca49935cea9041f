"""LMQL's own client of LMTP, unmodified, on a socket of a gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch
from lmql.models.lmtp.lmtp_client import LMTPWebSocketClient
from transformers import AutoModelForCausalLM

from specsplit.core.defaults import EMBEDDED
from specsplit.model.source import resolve


@asynccontextmanager
async def lmql_client(url: str, model: str = "embedded", **headers: str) -> AsyncGenerator[Any]:
    """Connect to LMTP at a URL for the length of the block."""
    async with aiohttp.ClientSession(headers=headers) as http, http.ws_connect(url) as socket:
        made = LMTPWebSocketClient(model, socket)
        made.connect()
        yield made
        made.handler.cancel()


async def collect(stream: Any) -> list[dict[str, Any]]:
    """Return all items of a stream."""
    return [item async for item in stream]


def assert_logprobs(prompt: list[int], items: list[dict[str, Any]], num_top: int) -> None:
    """Compare with log_softmax of transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(resolve(EMBEDDED, "target")[0], dtype=torch.float32).eval()
    tokens = [item["token"] for item in items]
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([[*prompt, *tokens]])).logits[0].float(), -1)
    for row, item in zip(rows[len(prompt) - 1 :], items, strict=False):
        values, _ = row.topk(num_top)
        first, *rest = item["top_logprobs"].items()
        assert first == (str(item["token"]), item["logprob"])
        assert item["logprob"] == pytest.approx(row[item["token"]].item(), abs=1e-4)
        assert all(value == pytest.approx(row[int(token)].item(), abs=1e-4) for token, value in rest)
        likeliest = sorted({*item["top_logprobs"].values()}, reverse=True)[:num_top]
        assert likeliest == pytest.approx(values.tolist(), abs=1e-4)
