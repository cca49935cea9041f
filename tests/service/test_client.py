"""The asyncio client before real workers, in a process that has no torch."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from specsplit import Client, InvalidRequest, Pipeline, SpecSplitError, UsageError
from tests.support.processes import WorkerProcess, environment
from tests.support.wrong_inputs import PROMPTS, REQUEST_OPTIONS, SEVERAL

OPTIONS = ("--dtype", "fp32", "--threads", "1", "--context", "512")
PROGRAM = """
import sys
sys.modules["torch"] = None
import asyncio, json
from specsplit import Client
async def main():
    async with Client(sys.argv[1], max_new_tokens=12, temperature=0.8) as client:
        results = await client.generate(["def f(", [100, 200, 300]], seed=5)
        streamed = "".join([chunk.text async for chunk in client.stream("def f(", seed=5)])
        said = await client.generate([{"role": "user", "content": "Hi"}], seed=5)
        scores = await client.score([100], [200, 300])
        print(json.dumps([*[result.text for result in results], streamed, said.prompt_token_ids, len(scores.tokens)]))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Generator[WorkerProcess]:
    started = WorkerProcess("target", tmp_path_factory.mktemp("target"), *OPTIONS)
    yield started
    started.close()


def test_a_process_without_torch_gets_the_texts_of_a_pipeline(target: WorkerProcess):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, target.address],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), "nor does a library complain that there is none"
    first, second, streamed, said, num_scores = json.loads(done.stdout)
    with Pipeline(dtype="fp32", threads=1, context=512, mode="plain", max_new_tokens=12, temperature=0.8) as pipeline:
        expected = pipeline.generate(["def f(", [100, 200, 300]], seed=5)
        answer = pipeline.generate([{"role": "user", "content": "Hi"}], seed=5, max_new_tokens=1)
    assert [first, second] == [result.text for result in expected]
    assert (streamed, num_scores) == (first, 2)
    assert said == list(answer.prompt_token_ids)


async def test_errors_are_raised_where_they_belong_and_the_client_goes_on(target: WorkerProcess):
    client = Client(target.address)
    async with client:
        with pytest.raises(InvalidRequest, match="whole numbers, not str"):
            client.stream([1, "x"])  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            await client.generate([[1, 2], [10**6]], max_new_tokens=2)
        assert len((await client.generate("Hi", max_new_tokens=2, ignore_eos=True)).token_ids) == 2
    with pytest.raises(InvalidRequest, match="not connected"):
        await client.generate("Hi")
    with pytest.raises(SpecSplitError, match="cannot be reached"):
        async with Client("127.0.0.1:9", retry=0.1):
            pass


@pytest.mark.slow
async def test_whatever_is_wrong_is_one_sentence_and_the_client_goes_on(target: WorkerProcess):
    calls: list[tuple[Any, dict[str, Any]]] = [
        *((prompt, {}) for prompt in (*PROMPTS, *SEVERAL)),
        *(("a", options) for options in REQUEST_OPTIONS),
    ]
    scores: list[tuple[Any, Any, int]] = [([], [1], 0), ([1], [], 0), ([1], [10**6], 0), ([-1], [1], 0), ([1], [2], 99)]
    async with Client(target.address, max_new_tokens=4) as client:
        text = (await client.generate("def f(")).text
        for prompt, options in calls:
            with pytest.raises(UsageError, match=r"^[^\n]*[^.]\.$"):
                await client.generate(prompt, **options)
        for prompt, scored, top in scores:
            with pytest.raises(InvalidRequest, match=r"^[^\n]*[^.]\.$"):
                await client.score(prompt, scored, top_logprobs=top)
        assert (await client.generate("def f(")).text == text
