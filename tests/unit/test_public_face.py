"""The public face of the package: its names, what importing it costs, its types for users, and its page."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import specsplit
from specsplit.core import errors
from tests.support.forked import ROOT
from tests.support.processes import environment
from tools.api_page import PAGE, page

USER_CODE = """
import asyncio
from pathlib import Path

import torch

from specsplit import Chunk, Client, InvalidRequest, Pipeline, RequestOptions, Result, SpecSplitError

options: RequestOptions = {"max_new_tokens": 16, "temperature": 0.7, "stop": ["x"], "logit_bias": {5: 1.0}}
options["chat_template_kwargs"] = {"enable_thinking": False, "effort": "low"}


def texts(results: list[Result]) -> list[str]:
    return [result.text for result in results]


def use(pipeline: Pipeline) -> None:
    one: Result = pipeline.generate("Hi", **options)
    ids: Result = pipeline.generate([1, 2, 3], seed=5)
    said = [{"role": "user", "content": "Hi"}]
    answer: Result = pipeline.generate(said)
    many: list[Result] = pipeline.generate(["a", "b"])
    mixed: list[Result] = pipeline.generate(["a", [1, 2], said])
    for chunk in pipeline.stream("Hi", mode="lookup"):
        shown: Chunk = chunk
        print(shown.text, [text for text, _ in shown.pieces], shown.finish_reason)
    print(one.text, ids.token_ids, answer.seed, texts(many), texts(mixed))
    print(one.timings.ttft_s, one.speculative_decoding.mean_acceptance_length, one.to_dict()["text"])


def main() -> None:
    with Pipeline(Path("large"), draft_model="small", dtype=torch.bfloat16, device=torch.device("cpu")) as pipeline:
        use(pipeline)
    try:
        Pipeline(config=Path("x.toml"), context=512, threads="auto")
    except InvalidRequest as error:
        print(error.param)
    except SpecSplitError as error:
        print(error, error.exit_code)


async def amain() -> None:
    async with Pipeline() as pipeline:
        whole: Result = await pipeline.agenerate("Hi")
        async for chunk in pipeline.astream("Hi"):
            print(chunk.text, whole.text)
    async with Client("host:1", "host:2", temperature=1.0) as client:
        result: Result = await client.generate("Hi", **options)
        results: list[Result] = await client.generate(["a", "b"])
        scores = await client.score([1], [2, 3], top_logprobs=2)
        print(result.text, texts(results), [token.log_prob for token in scores.tokens])
        async for chunk in client.stream("Hi"):
            print(chunk.text)


main()
asyncio.run(amain())
"""
WRONG = """
from specsplit import Pipeline, Result

with Pipeline(dtype="fp8") as pipeline:
    first: Result = pipeline.generate(["a", "b"])
    second = pipeline.generate("a", max_tokens=5)
    third: str = pipeline.generate(5)
"""


def test_the_names_are_shown_and_imported_on_first_use():
    public = set(specsplit.__all__)
    assert public <= set(dir(specsplit))
    assert {"Pipeline", "Client", "Result", "Chunk", "RequestOptions", "SpecSplitError"} <= public
    for name in public:
        assert getattr(specsplit, name) is not None
    tree = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert tree <= public, "the whole tree of errors"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("LLM", "Pipeline"),
        ("SamplingParams", "RequestOptions"),
        ("AutoModelForCausalLM", "Pipeline"),
        ("AutoTokenizer", "token ids"),
        ("RequestOutput", "Result"),
    ],
)
def test_a_name_of_others_is_answered_with_ours(name: str, ours: str):
    with pytest.raises(ImportError, match=rf"^There is no {name} in specsplit; .*{ours}.*\.$"):
        exec(f"from specsplit import {name}", {})  # noqa: S102  (the statement itself is tested)
    with pytest.raises(AttributeError, match=rf"^module 'specsplit' has no attribute '{name}'; .*{ours}"):
        getattr(specsplit, name)
    assert not hasattr(specsplit, name)
    assert getattr(specsplit, name, None) is None
    assert name not in dir(specsplit)


def test_a_name_of_nobody_is_pythons_own_error():
    with pytest.raises(ImportError, match="cannot import name 'Nope' from 'specsplit'"):
        exec("from specsplit import Nope", {})  # noqa: S102  (the same)
    with pytest.raises(AttributeError, match=r"^module 'specsplit' has no attribute 'Nope'$"):
        getattr(specsplit, "Nope")  # noqa: B009


def test_importing_the_package_imports_next_to_nothing():
    program = """
import sys
before = set(sys.modules)
import specsplit
dir(specsplit)
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
specsplit.SpecSplitError, specsplit.RequestOptions, specsplit.Result, specsplit.Pipeline, specsplit.Client
assert not {"torch", "transformers", "grpc"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment(), timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "['specsplit']\n"), done.stderr


def test_the_types_are_complete_for_users_who_are_strict(tmp_path: Path):
    (tmp_path / "user.py").write_text(USER_CODE, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}', encoding="utf-8")
    # As if it were installed, where py.typed counts and pyright infers nothing.
    (tmp_path / "typings").mkdir()
    (tmp_path / "typings" / "specsplit").symlink_to(ROOT / "specsplit")
    pyright = Path(sys.executable).with_name("pyright")
    done = subprocess.run(
        [pyright, "--pythonpath", sys.executable, "--project", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    complaints = [line for line in done.stdout.splitlines() if " - error" in line or " - warning" in line]
    assert not [line for line in complaints if "user.py" in line], done.stdout
    lines = {line.partition("wrong.py:")[2].partition(":")[0] for line in complaints}
    assert lines == {"4", "5", "6", "7"}, done.stdout


def test_the_package_says_that_it_has_types():
    assert (ROOT / "specsplit" / "py.typed").exists()


def test_the_page_of_the_api_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "make api-page writes it"
