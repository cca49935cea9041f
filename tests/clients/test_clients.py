"""Other people's clients against a gateway: evaluation, adapters and load generators, each as its maker ships it.

Each has an environment of its own below `.clients`, made when it is first needed: they do not fit into one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from specsplit.core.defaults import EMBEDDED
from specsplit.model.source import resolve
from tests.support.forked import ROOT
from tests.support.gateways import GatewayProcess

PACKAGES = {
    "lm-eval": ("lm-eval[api]>=0.4.9", "transformers"),
    "langchain": ("langchain-openai>=1",),
    "llama-index": ("llama-index-llms-openai-like>=0.5",),
    "guidellm": ("guidellm>=0.6",),
    "aiperf": ("aiperf>=0.5",),
}
PROMPT = "def add(a, b):\n"
LIMIT_S = 600


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    started = GatewayProcess(tmp_path_factory.mktemp("gateway"), "--per-request-spec-decode-metrics", "summary")
    yield started
    started.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with the model's tokenizer."""
    folder, source = tmp_path_factory.mktemp("here"), Path(resolve(EMBEDDED, "target")[0])
    (folder / "target").symlink_to(source.resolve())
    return folder


def programs(client: str) -> Path:
    """Return the folder of the client's programs, which are installed if they are not there."""
    folder = ROOT / ".clients" / client
    whole = folder / "is-whole"
    if not whole.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PACKAGES[client]], check=True)
        whole.touch()
    return folder / "bin"


def run(*arguments: str | Path, folder: Path | None = None) -> str:
    """Run a program to its end; return what it wrote."""
    # AIPerf takes the folder of a tokenizer for the name of a repository if it is told to be offline.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


TASK = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list:
  - metric: acc
"""
CHAT_TASK = """
task: chat
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 8}}
metric_list:
  - metric: exact_match
"""
QUESTIONS = (
    ("def add(a, b):\n    return a", [" + b", " banana"], 0),
    ("import os\n\nprint(os.", ["path", "purple elephant"], 0),
    ("for i in range(10):\n    print(", ["qqqq", "i)"], 1),
)


def evaluate(name: str, task: str, folder: Path, *arguments: str) -> None:
    """Run a task of lm-eval over QUESTIONS; what it found is written below `folder`."""
    lines = [json.dumps({"question": text, "choices": choices, "gold": gold}) for text, choices, gold in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines))
    (folder / f"{name}.yaml").write_text(task.format(data=folder / "data.jsonl"))
    asked = ("--tasks", name, "--include_path", folder, "--output_path", folder / "out", "--log_samples")
    run(programs("lm-eval") / "lm_eval", *arguments, *asked)


def test_lm_eval_scores_a_task_by_log_likelihoods(gateway: GatewayProcess, tokenizer: Path, tmp_path: Path) -> None:
    model = f"model=embedded,base_url={gateway.url}/v1/completions,tokenizer={tokenizer / 'target'}"
    evaluate("tiny", TASK, tmp_path, "--model", "local-completions", "--model_args", model)
    (found,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(found.read_text())["results"]["tiny"]["acc,none"] == 1.0


def test_lm_eval_asks_in_chats(gateway: GatewayProcess, tmp_path: Path) -> None:
    model = f"model=embedded,base_url={gateway.url}/v1/chat/completions"
    chat = ("--model", "local-chat-completions", "--model_args", model, "--apply_chat_template")
    evaluate("chat", CHAT_TASK, tmp_path, *chat)
    (found,) = (tmp_path / "out").rglob("samples_chat_*.jsonl")
    assert len(found.read_text().splitlines()) == len(QUESTIONS)


LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI, OpenAI
here = dict(model="embedded", base_url=sys.argv[1], api_key="none", max_tokens=12, temperature=0)
chat, text = ChatOpenAI(**here), OpenAI(**here)
said = chat.invoke(sys.argv[2]).content
assert said and said == "".join(part.content for part in chat.stream(sys.argv[2]))
assert text.invoke(sys.argv[2]) == "".join(text.stream(sys.argv[2])) == text.batch([sys.argv[2], "x"])[0]
"""
LLAMA_INDEX = """
import sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
here = dict(model="embedded", api_base=sys.argv[1], api_key="none", max_tokens=12, temperature=0)
chat, text = OpenAILike(**here, is_chat_model=True), OpenAILike(**here, is_chat_model=False)
asked = [ChatMessage(role="user", content=sys.argv[2])]
said = chat.chat(asked).message.content
assert said and said == "".join(part.delta for part in chat.stream_chat(asked))
assert text.complete(sys.argv[2]).text == "".join(part.delta for part in text.stream_complete(sys.argv[2]))
"""


@pytest.mark.parametrize(("client", "program"), [("langchain", LANGCHAIN), ("llama-index", LLAMA_INDEX)])
def test_adapters_chat_and_stream(client: str, program: str, gateway: GatewayProcess) -> None:
    run(programs(client) / "python", "-c", program, f"{gateway.url}/v1", PROMPT)


def test_guidellm_measures_it(gateway: GatewayProcess, tokenizer: Path) -> None:
    run(
        *(programs("guidellm") / "guidellm", "run", "--backend", f"kind=openai_http,target={gateway.url}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer / 'target'}"),
        *("--profile", "kind=concurrent,streams=[2]", "--constraint", "kind=max_requests,count=8"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        folder=tokenizer,
    )
    assert (tokenizer / "benchmarks.json").is_file()


def test_aiperf_reads_how_speculation_did(gateway: GatewayProcess, tokenizer: Path) -> None:
    run(
        *(programs("aiperf") / "aiperf", "profile", "--model", "embedded", "--url", gateway.url, "--ui", "none"),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", "./target", "--concurrency", "2"),
        *("--request-count", "8", "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"),
        folder=tokenizer,
    )
    (found,) = tokenizer.rglob("profile_export_aiperf.json")
    assert any("acceptance_length" in name for name in json.loads(found.read_text()))
