"""Many prompts in a file: what a line may be, what an output may hold, and what is still to be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specsplit.assembly.workers import Placement, Workers
from specsplit.cli import prompts_file
from specsplit.cli.answers_file import AnswersFile
from specsplit.cli.main import main
from specsplit.core.errors import InvalidRequest
from specsplit.core.settings import load_settings
from specsplit.engine import event_loop
from tests.support.fakes import FakeTarget, FakeTokenizer

Capture = pytest.CaptureFixture[str]


class Files:
    """A file of prompts and one of answers."""

    def __init__(self, folder: Path, target: FakeTarget) -> None:
        self.prompts, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.target = target

    def run(self, *lines: str | dict[str, Any], **given: Any) -> int:
        """Run the command on these lines, with plain decoding unless `mode` is given."""
        self.prompts.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        settings = load_settings({"mode": "plain"}).settings
        options = {"prompts_file": str(self.prompts), "output": str(self.output), **given}
        batch = prompts_file.read_batch(options, settings)
        assert batch is not None
        return event_loop.run(batch.run(None))

    def answers(self) -> dict[str | int, dict[str, Any]]:
        entries = [json.loads(line) for line in self.output.read_text().splitlines()]
        by_id = {entry.pop("id") or f"line {entry['line']}": entry for entry in entries}
        assert len(by_id) == len(entries)
        return by_id


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    target = FakeTarget(context=64)

    class Opened(Workers):
        async def __aenter__(self) -> Workers:
            return self

        async def __aexit__(self, *raised: object) -> None:
            await self.aclose()

    monkeypatch.setattr(
        prompts_file, "open_workers", lambda *_: Opened(target, None, FakeTokenizer(), Placement(max_requests=2))
    )
    return Files(tmp_path, target)


def test_every_line_has_an_answer_or_a_reason(files: Files, capsys: Capture):
    code = files.run(
        {"prompt": "one", "max_new_tokens": 3, "ignore_eos": True},
        "",
        {
            "id": "b",
            "token_ids": [1, 2, 3],
            "max_new_tokens": 2,
            "stop": "[1]",
            "seed": None,
            "ignore_eos": True,
            "priority": 9,
        },
        "no JSON",
        "[1]",
        {"id": [1], "prompt": "x"},
        {"id": "neither"},
        {"id": "both", "prompt": "x", "token_ids": [1]},
        {"id": "empty", "prompt": ""},
        {"id": "ids", "token_ids": [1, True]},
        {"id": "number", "prompt": 5},
        {"id": "typo", "prompt": "x", "temprature": 1},
        {"id": "chat", "prompt": "x", "chat": True, "chat_template_kwargs": {"a": 1}, "max_new_tokens": 1},
        {"id": "plain", "prompt": "x", "chat_template_kwargs": {"a": 1}},
        {"id": "table", "prompt": "x", "chat_template_kwargs": {"a": []}},
        {"id": "hot", "prompt": "x", "temperature": -1},
        {"id": "long", "token_ids": [1] * 99},
        concurrency=3,
    )
    answers = files.answers()
    assert code == 1
    assert len(answers[1]["token_ids"]) == 3
    assert (answers["b"]["prompt_token_ids"], len(answers["b"]["token_ids"])) == ([1, 2, 3], 2)
    assert {"text", "finish_reason", "seed"} <= answers["b"].keys()
    reasons = {key: entry["error"] for key, entry in answers.items() if "error" in entry}
    wrong = {
        "line 4",
        "line 5",
        "line 6",
        "neither",
        "both",
        "empty",
        "ids",
        "number",
        "typo",
        "hot",
        "long",
        "plain",
        "table",
    }
    assert reasons.keys() == wrong
    assert "the nearest one is temperature" in reasons["typo"]
    assert "temperature must be" in reasons["hot"]
    assert "chat_template_kwargs must have true or false, a number or a text as a." in reasons["table"]
    assert "needs messages, or a text with chat" in reasons["plain"]
    assert bytes(answers["chat"]["prompt_token_ids"]) == b"user: x\na=1\n"
    assert "leaves no room" in reasons["long"]
    assert "16 of 16 prompts done, 13 failed" in capsys.readouterr().err
    assert not files.target.slots


def test_no_answer_stands_for_two_prompts(files: Files):
    lines = [{"id": "a", "prompt": "x", "max_new_tokens": 1}, {"id": "a", "prompt": "y"}]
    for _ in range(2):
        assert files.run(*lines) == 1
        entries = [json.loads(line) for line in files.output.read_text().splitlines()]
        assert [entry["id"] for entry in entries] == ["a", "a"]
        assert [entry.get("error") for entry in entries].count(None) == 1
        assert entries[0].get("error", entries[1].get("error")) == "The id 'a' is that of line 1 already."


def test_a_broken_line_takes_no_id_of_another(files: Files):
    good = [{"id": number, "prompt": "x", "max_new_tokens": 1} for number in range(1, 4)]
    assert files.run(good[0], '{"id": 4, "prompt": "b",}', good[1], good[2]) == 1
    answers = files.answers()
    assert answers.pop("line 2") == {"line": 2, "error": "The line is no JSON."}
    assert answers.keys() == {1, 2, 3}
    assert all("error" not in entry for entry in answers.values())
    assert files.run(good[0], {"id": 4, "prompt": "b", "max_new_tokens": 1}, good[1], good[2]) == 0
    assert files.answers().keys() == {1, 2, 3, 4}, "the error of a line without an id is not kept"


def test_the_same_command_goes_on_where_the_last_one_ended(files: Files, capsys: Capture):
    lines = [{"id": f"p{number}", "prompt": "x" * (number + 1), "max_new_tokens": 2} for number in range(5)]
    assert files.run(*lines[:3]) == 0
    before = files.output.read_bytes()
    num_forwards = files.target.num_forwards
    # The last line was cut in the middle by a crash.
    files.output.write_bytes(before + b'{"id": "p3", "te')
    assert files.run(*lines) == 0
    assert files.output.read_bytes().startswith(before)
    assert files.answers().keys() == {line["id"] for line in lines}
    assert files.target.num_forwards <= num_forwards * 5 / 3 + 1
    assert "3 had their answers before" in capsys.readouterr().err


def test_what_failed_is_tried_again_and_errors_of_other_prompts_are_kept(files: Files):
    other = json.dumps({"id": "other", "error": "of another file"})
    files.output.write_text(other + "\n")
    assert files.run({"id": "a", "prompt": "x", "max_new_tokens": 1}, {"id": "b", "token_ids": [1] * 99}) == 1
    assert files.run({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "max_new_tokens": 1}) == 0
    answers = files.answers()
    assert answers.keys() == {"other", "a", "b"}
    assert len(answers["a"]["token_ids"]) == len(answers["b"]["token_ids"]) == 1
    assert files.output.read_text().startswith(other)


@pytest.mark.parametrize(
    "content",
    ['{"architectures": ["A"]}', "a note", '{"id": "a", "prompt": "x"}', '{"id": "a", "prompt": "x"}\n{"id": 2}\n'],
)
def test_a_file_of_something_else_is_refused_and_stays(content: str, files: Files):
    files.output.write_text(content)
    with pytest.raises(InvalidRequest, match=r"Line 1 of .*out\.jsonl is no answer; name another file"):
        files.run({"id": "a", "prompt": "x", "max_new_tokens": 1})
    assert files.output.read_text() == content


@pytest.mark.parametrize("begun", ["", '{"id": 1, "error": "tried again, for which the file is written anew"}\n'])
def test_one_command_at_a_time_writes_to_an_output(begun: str, files: Files):
    files.output.write_text(begun)
    answers = AnswersFile.open(files.output, retried={1, 2})
    with pytest.raises(InvalidRequest, match=r"Another command writes to .*out\.jsonl; wait for its end"):
        files.run({"prompt": "x", "max_new_tokens": 1})
    answers.write({"id": 2, "text": "of the first command"})
    answers.close()
    assert files.run({"prompt": "x", "max_new_tokens": 1}) == 0
    assert files.answers().keys() == {1, 2}
    assert {file.name for file in files.output.parent.iterdir()} == {"in.jsonl", "out.jsonl"}, "no lock is left"


def test_an_output_keeps_its_mode_when_the_command_goes_on(files: Files):
    files.output.write_bytes(b'{"id": "cut')
    files.output.chmod(0o600)
    assert files.run({"prompt": "x", "max_new_tokens": 1}) == 0
    assert files.answers().keys() == {1}
    assert files.output.stat().st_mode & 0o777 == 0o600


def test_nothing_is_loaded_where_every_prompt_has_its_answer(tmp_path: Path, capsys: Capture):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    output.write_text('{"id": 1, "text": "b"}\n')
    given = ["--prompts-file", str(source), "--output", str(output), "--target-model", "no/such/model"]
    assert main(["orchestrate", *given]) == 0
    assert "1 had their answers before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "o"], "--output is for many prompts; name their file with --prompts-file."),
        (["--prompt", "a", "--concurrency", "2"], "--concurrency is for many prompts"),
        (["--prompts-file", "{in}"], "--prompts-file needs a file for the answers"),
        (
            ["--prompts-file", "{in}", "--output", "o", "--prompt", "a"],
            "--prompt and --prompts-file exclude each other",
        ),
        (["--prompts-file", "{in}", "--output", "o", "--json"], "--json and --prompts-file exclude each other"),
        (["--prompts-file", "{in}", "--output", "{in}"], "name the same file"),
        (["--prompts-file", "{in}", "--output", "-"], "--output must name a file that can be read again, not -."),
        (["--prompts-file", "{in}", "--output", "o", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["--prompts-file", "no/such", "--output", "o"], "The prompts file no/such cannot be read"),
        (["--prompts-file", "{in}", "--output", "no/such/o"], "cannot be written (No such file or directory)"),
        (["--prompts-file", "{in}", "--output", "{notes}"], "Line 1 of {notes} is no answer; name another file"),
    ],
)
def test_wrong_usage_is_one_sentence_and_changes_no_file(
    arguments: list[str], message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    paths = {"in": str(tmp_path / "in.jsonl"), "notes": str(tmp_path / "notes.txt")}
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "notes.txt").write_text("my notes\nand more\n")
    assert main(["orchestrate", *(each.format(**paths) for each in arguments)]) == 2
    assert message.format(**paths) in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "my notes\nand more\n"
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt": "a"}\n'
    assert not (tmp_path / "-").exists()
