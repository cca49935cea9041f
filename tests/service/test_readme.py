"""README's own commands, read from it and run as a user would, with the embedded pair in the place of larger models."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support.forked import ROOT
from tests.support.processes import LIMIT_S, WorkerProcess, environment, run, start

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("  #")[0].strip()
    for line in README.splitlines()
    if re.match(r"    (specsplit|make|source|pip|curl|cat|python) ", line)
]
NOT_RUN = {
    "make demo": "installs the packages, as every target of make does that CI runs",
    "source .venv/bin/activate": "only names the environment of the shell",
    "pip install '.[worker,gateway]'": "installs torch from the network; `make wheel` installs what was built, without",
    "pip install 'specsplit[gateway]'": "asks the network for the HTTP server, which the tools of CI have already",
    "make wheel": "is a step of CI of its own, since it asks the network for the build backend",
    'pip install "$(echo dist/*.whl)[worker]"': "is what `make wheel` does, with dependencies that are there already",
}
"""Commands that no test runs, each with the reason."""
ANSWERING = ("specsplit orchestrate", "specsplit --help", "cat ", "specsplit doctor", "specsplit chat")
IN_PLACE_OF = {
    # Their weights are gigabytes on the hub.
    **dict.fromkeys(("./Qwen3-8B", "./Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"), "embedded"),
    "cuda": "cpu",
    "bf16": "fp32",
    "8": "2",
}
LISTENS = {
    "big-host:7001": "0.0.0.0:7001",
    "small-host:7002": "0.0.0.0:7002",
    "127.0.0.1:7001": "127.0.0.1:7001",
    "127.0.0.1:7002": "127.0.0.1:7002",
}
"""The addresses of README's workers, and where each of them listens."""
RUN = [command for command in COMMANDS if command not in NOT_RUN]
ANSWERED = [command for command in RUN if command.startswith(ANSWERING)]
SERVED = [command for command in RUN if command.startswith("specsplit serve")]


def _arguments(command: str, places: dict[str, str]) -> list[str]:
    """Return what stands behind `specsplit`, with what is here in the place of what README names."""
    return [places.get(word, IN_PLACE_OF.get(word, word)) for word in shlex.split(command)[1:]]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """README's targets and drafts; the addresses of theirs by those of README."""
    started: dict[str, WorkerProcess] = {}
    for place, listen in LISTENS.items():
        (command,) = [each for each in RUN if each.endswith(f"-l {listen}")]
        role, *arguments = _arguments(command, {})
        started[place] = WorkerProcess(role, tmp_path_factory.mktemp("readme"), *arguments[:-2])
    try:
        yield {place: worker.address for place, worker in started.items()}
    finally:
        for worker in started.values():
            worker.close()


def test_every_command_is_run_or_has_a_reason():
    workers = [command for command in RUN if command.startswith(("specsplit target", "specsplit draft"))]
    asked = [command for command in RUN if command.startswith("curl ")]
    assert sorted([*ANSWERED, *SERVED, *workers, *asked]) == sorted(RUN)
    assert set(NOT_RUN) <= set(COMMANDS), "a reason for a command that README no longer has"
    assert (len(workers), len(asked)) == (len(LISTENS), 1)


@pytest.mark.parametrize("command", ANSWERED)
def test_a_command_of_readme_answers(
    command: str, workers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "def f("}\n{"prompt": "import os", "max_new_tokens": 3}\n')
    stdin = b"Hello\n/quit\n" if " chat" in command else b""
    if command.startswith("cat "):
        source, _, command = command.removeprefix("cat ").partition(" | ")
        stdin = (ROOT / source).read_bytes()
    arguments = _arguments(command, workers)
    code, out, err = run(*arguments, stdin=stdin, OMP_NUM_THREADS="1")
    assert (code, "Error" in err) == (0, False), err
    written = Path("answers.jsonl").read_text() if "--output" in arguments else out
    assert written.strip()


PLAIN_SERVE = "specsplit serve"
"""The others that start their own workers differ from it in the models alone."""


def _served() -> Iterator[Any]:
    for command in SERVED:
        is_repeated = command != PLAIN_SERVE and "--target" not in command
        yield pytest.param(command, marks=pytest.mark.slow if is_repeated else ())


@pytest.mark.parametrize("command", list(_served()))
def test_a_gateway_of_readme_serves_what_its_curl_asks(command: str, workers: dict[str, str]):
    (asked,) = [shlex.split(each) for each in RUN if each.startswith("curl ")]
    url, body = asked[1], asked[asked.index("-d") + 1].encode()
    name, _, value = asked[asked.index("-H") + 1].partition(": ")
    process = start(*_arguments(command, workers), "--http", "127.0.0.1:0", OMP_NUM_THREADS="1")
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        here = url.replace("127.0.0.1:8000", ready["address"])
        with urlopen(Request(here, body, {name: value}), timeout=LIMIT_S) as answer:
            assert json.load(answer)["choices"][0]["text"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)


def test_the_python_of_readme_runs(tmp_path: Path):
    (source,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_links_of_readme_and_of_the_index_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "docs/README.md", ROOT / "docs/command-line.md"):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if name.startswith("http"):
                continue
            found = page.parent / name if name else page
            assert found.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}, target


def test_the_index_names_every_page():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page}" not in index} == set()
