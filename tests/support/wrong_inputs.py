"""Wrong inputs to the Python API: each has one thing wrong, which the message has to name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NAN, INF = math.nan, math.inf
HALF = "\ud800"
"""Half a character, which no encoding has."""
SAID: dict[str, Any] = {"role": "user", "content": "Hi"}
OPTIONS: tuple[dict[str, Any], ...] = (
    *({"max_new_tokens": value} for value in (0, -1, 1.5, NAN, "x", True, b"5", [1])),
    *({"temperature": value} for value in ("hot", -1, 101, NAN, INF, True, [1], 1j, b"1")),
    *({"top_p": value} for value in (0, 2, NAN, "x", True)),
    *({"top_k": value} for value in (-1, 1.5, "all", True)),
    *({"min_p": value} for value in (-1, 1.5, NAN)),
    *({"presence_penalty": 3}, {"frequency_penalty": NAN}, {"repetition_penalty": 0}, {"repetition_penalty": INF}),
    *({"logit_bias": value} for value in ({"x": 1}, {-1: 1}, {1: NAN}, {1: 1e9}, {1: None}, {True: 1}, {1: True})),
    *({"logit_bias": value} for value in ({1: "x"}, 5, "5", [1], [(1, 2, 3)])),
    *({"logprobs": value} for value in (-1, 21, 1.5, "x", True)),
    *({"seed": value} for value in (-1, 2**64, 1.5, NAN, "x", True, np.float64(1.5))),
    *({"stop": value} for value in (5, "", [""], [5], ["a", None], b"x", ["a", b"x"], {"a": 1}, HALF)),
    *({"ignore_eos": "maybe"}, {"chat": "maybe"}, {"chat": 5}, {"lookup": "maybe"}, {"lookup": 5}),
    *({"chat_template_kwargs": value} for value in ("{", 5, [1], {5: 1}, {"a b": 1}, {"a": [1]}, {"messages": "x"})),
    *({"mode": value} for value in ("fast", "AUTO", "", 5, ["auto"], b"plain")),
    *({"nodes": value} for value in (0, -1, 10**9, 1.5, True)),
    *({"depth": 0}, {"depth": "x"}, {"branching": 0}, {"branching": 2.5}, {"branching": True}),
    *({"timeout": value} for value in (0, -1, NAN, INF, "soon", True)),
    *({"priority": 10}, {"priority": "high"}),
    *({"retry": -1}, {"retry": "soon"}, {"draft_patience": 0}, {"audit": 2}, {"audit": NAN}, {"auditor": "x"}),
    *({"temprature": 1}, {"nonsense": 1}, {"max_tokens": 5}, {"do_sample": True}, {"n": 2}, {"stream": True}),
)
"""Options that no request, pipeline or client takes."""
REQUEST_OPTIONS: tuple[dict[str, Any], ...] = (
    *OPTIONS,
    *({"target_model": "x"}, {"context": 64}, {"threads": 1}, {"device": "cpu"}, {"sessions": 2}),
    *({"logit_bias": {10**6: 1}}, {"logit_bias": {2**70: 1}}, {"chat_template_kwargs": {"a": 1}}),
)
"""Those that no request takes, though a pipeline might."""
PROMPTS: tuple[Any, ...] = (
    *(None, 5, 1.5, NAN, b"bytes", bytearray(b"x"), SAID, object(), {1, 2}, iter([1]), Path("x"), np.array([1, 2])),
    *(True, 1j, frozenset([1]), {"prompt": "x"}, memoryview(b"x"), map(str, "a"), str, len),
    *("", [], (), range(0), HALF, [1, "a"], [1.0], [None], [True], [1, [2]], (1, None), [NAN]),
    *([-1], [10**6], [2**70], [1] * 9000, "x " * 9000),
    *([5, -1], [1, 4096], [1, HALF], [1, NAN], "a\udfffb"),
    *([{"text": "x"}], [{**SAID, "role": None}], [{**SAID, "role": HALF}], [{**SAID, "name": HALF}]),
    *([{}], [{5: "x"}], [{"role": "user"}], [{"content": "x"}], [{**SAID, "content": None}], [{**SAID, "role": 5}]),
    *([{**SAID, "content": [{"type": "text", "text": "x"}]}], [{**SAID, "content": HALF}], [{**SAID, "content": ""}]),
    *(
        [{**SAID, "name": 5}],
        [{**SAID, "name": "n" * 65}],
        [{**SAID, "tools": "x"}],
        [SAID, "x"],
        [SAID, 5],
        [SAID, []],
    ),
)
"""What is no prompt, or none that the embedded model could take."""
SEVERAL: tuple[Any, ...] = (
    *(["a", ""], ["a", None], ["a", 5], ["a", b"x"], ["a", HALF], ["a", [True]], ["a", [10**6]]),
    *([[1], []], [[1], [None]], [[1], "a", [{}]], [[SAID], [5, "a"]], [[[1]]], [[]], ([1], [-1])),
)
"""Lists of prompts of which one is wrong."""
SETTINGS: tuple[dict[str, Any], ...] = (
    *OPTIONS,
    *({"target_model": value} for value in (5, True, b"x", "", ["x"], "host:7001")),
    *(
        {"target": value}
        for value in (5, b"a:1", "", ["a:1"], "nowhere", ":1", "host:", "a:99999", "a:0", "http://a:1")
    ),
    *({"target": "Qwen/Qwen3-8B"}, {"target": "a:1"}, {"draft": "x"}, {"draft": 5}, {"draft": "a:1"}),
    *({"draft_model": value} for value in (5, b"x", "", {"x"}, "host:7001")),
    *({"target": "a:1", name: value} for name, value in (("context", 64), ("sessions", 2), ("dtype", "fp32"))),
    *({"target": "a:1", "target_model": "embedded"}, {"draft": "a:1", "draft_model": "embedded"}),
    *({"config": value} for value in (5, b"x", "", "/nowhere.toml", "/")),
    *({"dtype": value} for value in (16, "float", "fp8", "FP32", np.float32)),
    *({"device": value} for value in (0, "", "gpu", "mps", "cuda:x")),
    *({"threads": value} for value in (0, -1, 1.5, NAN, "many", True, 10**9)),
    *({"context": value} for value in (0, 1, -1, 1.5, INF, "long", True)),
    *({"sessions": value} for value in (0, 1.5, "a", True, [1])),
    *({"kv_memory": value} for value in (5, "", "5%", "-1GiB", "1.5", True, [])),
    *({"draft_vocab": value} for value in (5, "", "./nowhere", "/", [1], b"x")),
    *({"tls_cert": 5}, {"target": "a:1", "tls_cert": "no.pem"}, {"insecure": "maybe"}, {"audit": 0.5}),
    *({"auditor": "a:1"}, {"mode": "lookup", "lookup": False}, {"modle": "x"}, {"model": "x"}, {"served_name": "x"}),
)
"""Settings that no pipeline takes."""
MODELS = (
    *("./nowhere", "/dev/null", "~nobody-here/x", "model.gguf", "org/name-GGUF:Q4_K_M", "not a name!", " ", "a\0b"),
    *("https://huggingface.co/a/b", "somebody/no-such", "no-such", "a/b@v1", "x" * 5000, "x/" * 3000, __file__),
)
"""Models that are not here and cannot be had."""


def spread(cases: tuple[Any, ...], few: int) -> list[Any]:
    """Return parameters for a test: all but a `few`, evenly spread, are for `make test-all`."""
    chosen = {number * len(cases) // few for number in range(few)}
    return [
        pytest.param(case, id=str(number), marks=() if number in chosen else pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
