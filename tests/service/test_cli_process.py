"""The command line on the embedded pair, in processes of its own where pipes, terminals and Ctrl-C matter."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specsplit.cli import doctor
from specsplit.cli.main import main
from specsplit.core.defaults import MOST_SERVED, SERVED_SESSIONS
from specsplit.telemetry import names
from tests.support.machine import DTYPE
from tests.support.processes import LIMIT_S, ROOT, command, environment, run, start

EMBEDDED = ROOT / "specsplit" / "model" / "embedded"
PROMPT = "def add(a, b):"
ENDLESS = ["--prompt", PROMPT, "--max-new-tokens", "2000", "--ignore-eos"]


def _run_on_terminal(*arguments: str, **changes: str) -> tuple[int, str]:
    """Run with a terminal for all three streams; return what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command(*arguments), environment(**changes))
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # Linux answers EIO once the other side is closed
        pass
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_help_needs_nothing_heavy():
    program = (
        "import sys; from specsplit.cli.main import main; code = main(['orchestrate', '--help']);"
        "heavy = {'torch', 'transformers', 'opentelemetry', 'pydantic_settings', 'tokenizers', 'asyncio'};"
        "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env=environment(), timeout=LIMIT_S, check=True
    )
    assert done.stderr == b"[] 0\n"


def test_a_text_needs_neither_compiler_nor_what_training_imports():
    program = (
        "import sys; from specsplit.cli.main import main; code = main();"
        "spared = {'sympy', 'scipy', 'sklearn', 'torch._dynamo.config', 'torch.distributed.tensor'};"
        "print(sorted(name for name in spared if sys.modules.get(name)), code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "orchestrate", "-n", "8", "x ="],
        capture_output=True,
        env=environment(),
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == b"[] 0"


@pytest.mark.parametrize("command", [("serve",), ("lmtp", "--stdio")])
def test_a_missing_model_is_refused_without_the_http_server(command: tuple[str, ...]):
    program = (
        "import sys; from specsplit.cli.main import main; code = main([*sys.argv[1:], '-m', './nowhere']);"
        "print(sorted({'fastapi', 'grpc', 'torch'} & set(sys.modules)), code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, env=environment(), timeout=LIMIT_S, check=True
    )
    assert done.stderr == b"Error: There is no model folder at ./nowhere.\n[] 1\n"


def test_json_is_one_object_on_one_line_with_the_fields_of_the_contract(tmp_path: Path):
    trace = tmp_path / "spans.jsonl"
    code, out, err = run(
        "orchestrate", "--prompt-file", "-", "--max-new-tokens", "24", "--json", "--trace-file", str(trace),
        stdin=PROMPT.encode(),
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert {
        "text", "token_ids", "prompt_token_ids", "finish_reason", "seed", "mode", "timings", "speculative_decoding",
        "target_forwards", "draft_forwards",
    } <= answer.keys()  # fmt: skip
    assert {"load_s", "ttft_s", "decode_s", "tokens_per_s"} <= answer["timings"].keys()
    speculative = answer["speculative_decoding"]
    assert {
        "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length",
        "draft_acceptance_rate", "acceptance_histogram",
    } <= speculative.keys()  # fmt: skip
    assert (len(answer["token_ids"]), answer["finish_reason"], answer["mode"]) == (24, "length", "auto")
    assert answer["timings"]["tokens_per_s"] == pytest.approx(23 / answer["timings"]["decode_s"])
    assert speculative["mean_acceptance_length"] == pytest.approx(
        1 + speculative["num_accepted_draft_tokens"] / speculative["num_spec_steps"]
    )
    _check_trace(trace, answer)


def _check_trace(path: Path, answer: dict[str, int]) -> None:
    spans = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {span["name"] for span in spans} >= {"round", "propose", "verify", "forward"}
    assert {span["name"] for span in spans} <= names.SPANS.keys()
    assert {name for span in spans for name in span["attributes"]} <= names.ATTRIBUTES.keys()
    assert len({span["trace_id"] for span in spans}) == 1
    by_id = {span["span_id"]: span for span in spans}
    callers = {"draft": "propose", "target": "verify"}
    forwards = [span for span in spans if span["name"] == "forward"]
    for span in forwards:
        assert by_id[span["parent_id"]]["name"] == callers[span["attributes"]["worker"]]
    workers = [span["attributes"]["worker"] for span in forwards]
    assert workers.count("target") == answer["target_forwards"]
    assert workers.count("draft") >= answer["draft_forwards"]  # one that nobody waited for in the end is not counted
    for span in spans:
        if "forwards" in span["attributes"]:  # of a call that was answered
            assert [each["parent_id"] for each in forwards].count(span["span_id"]) == span["attributes"]["forwards"]


def test_a_terminal_shows_the_same_text_with_marks_as_a_pipe_without(capfd: pytest.CaptureFixture[str]):
    arguments = ("orchestrate", "--prompt", PROMPT, "--max-new-tokens", "24", "--seed", "5", "--mode", "pingpong")
    code, shown = _run_on_terminal(*arguments)
    assert code == 0
    assert "\x1b[4;36mdrafted and accepted\x1b[0m, the target's own" in shown
    answer = shown.split("the target's own\r\n")[1].split("24 tokens (length)")[0]
    assert "\x1b[4;36m" in answer
    capfd.readouterr()
    assert main(arguments) == 0
    piped, err = capfd.readouterr()
    assert "\x1b" not in piped + err
    assert answer.replace("\x1b[4;36m", "").replace("\x1b[0m", "").replace("\r\n", "\n") == piped


@pytest.mark.slow
def test_no_color_is_honoured_on_a_terminal():
    code, shown = _run_on_terminal("orchestrate", "--prompt", PROMPT, "--max-new-tokens", "12", NO_COLOR="1")
    assert code == 0
    assert "\x1b[" not in shown.rsplit("\x1b[2K", 1)[1]  # what the loading bar erased before it
    assert "\x1b[4;36m" not in shown
    assert "12 tokens (length)" in shown


def _is_interrupted_summary(err: bytes) -> bool:
    return err.count(b"\n") == 1 and b" tokens (interrupted) | " in err and b" | seed " in err


def test_ctrl_c_keeps_the_text_prints_the_summary_and_exits_130():
    process = start("orchestrate", *ENDLESS)
    assert process.stdout is not None
    begun = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert _is_interrupted_summary(err)
    assert (begun + out).endswith(b"\n")


@pytest.mark.slow
def test_ctrl_c_leaves_no_half_object_and_a_whole_trace(tmp_path: Path):
    trace = tmp_path / "spans.jsonl"
    os.mkfifo(trace)  # reading from it tells when rounds have begun
    process = start("orchestrate", *ENDLESS, "--json", "--trace-file", str(trace))
    with trace.open("rb") as spans:
        begun = spans.readline()
        process.send_signal(signal.SIGINT)
        lines = [begun, *spans]
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (130, b"")
    assert _is_interrupted_summary(err)
    assert {json.loads(line)["name"] for line in lines} >= {"round", "forward"}


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "said"),
    [
        ("<&- 2>&-", ("orchestrate", "--prompt", PROMPT, "--max-new-tokens", "1"), 0, ""),
        (">&-", ("--version",), 0, ""),
        ("<&-", ("orchestrate", "--prompt-file", "-"), 2, "Error: The prompt is empty"),
        ("<&-", ("lmtp", "--stdio"), 2, "Error: LMTP over --stdio needs an open stdin and stdout"),
    ],
)
def test_a_closed_standard_stream_is_as_an_empty_one(closed: str, arguments: tuple[str, ...], code: int, said: str):
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command(*arguments)]
    done = subprocess.run(shell, capture_output=True, env=environment(), timeout=LIMIT_S, check=False, text=True)
    assert (done.returncode, done.stderr[: len(said)]) == (code, said), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stdout_that_cannot_be_written_is_one_sentence(unbuffered: str):
    with Path("/dev/full").open("wb") as full:
        env = environment(PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run(
            command("--version"), stdout=full, stderr=subprocess.PIPE, env=env, timeout=LIMIT_S, check=False
        )
    said = b"Error: Standard output cannot be written (No space left on device).\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_an_error_of_another_file_is_not_put_down_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def fail(given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == 1
    assert capfd.readouterr().err.startswith("Error: Unexpected OSError")


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_traceback():
    process = start("orchestrate", *ENDLESS)
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=LIMIT_S) == 1
    assert err == b""
    process.stderr.close()


def test_a_target_of_its_own_has_no_draft_and_says_so(capfd: pytest.CaptureFixture[str]):
    own = str(EMBEDDED / "target")
    assert main(["orchestrate", "--prompt", PROMPT, "--max-new-tokens", "4", "--target-model", own, "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == "No draft for this target: guessing from the text alone; name one with --draft-model.\n"
    answer = json.loads(out)
    assert (answer["mode"], answer["draft_forwards"]) == ("auto", 0)
    assert set(answer["rounds_by_mode"]) <= {"plain", "lookup"}


def test_explain_says_how_each_round_was_run_and_what_was_predicted(capfd: pytest.CaptureFixture[str]):
    assert main(["orchestrate", "--prompt", PROMPT, "--max-new-tokens", "40", "--ignore-eos", "--explain"]) == 0
    lines = capfd.readouterr().err.splitlines()
    rounds = [line for line in lines if line.startswith("round ")]
    assert [int(line.split()[1]) for line in rounds] == list(range(len(rounds)))
    assert any(re.match(r"predicted tok/s: .*plain \d+", line) for line in lines)


def test_compare_sets_plain_decoding_beside(capfd: pytest.CaptureFixture[str]):
    arguments = ["orchestrate", "--prompt", PROMPT, "--max-new-tokens", "24", "--temperature", "1", "--seed", "5"]
    assert main([*arguments, "--compare"]) == 0
    text, err = capfd.readouterr()
    summary, plain, auto, verdict = err.splitlines()
    assert summary.startswith("24 tokens (length) | ")
    assert (plain.split()[0], auto.split()[0]) == ("plain", "auto")
    assert verdict.endswith("x plain decoding, texts identical")
    assert main([*arguments, "--compare", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    exactness = re.escape(f"{DTYPE} exactness {answer['exactness']}")
    assert re.search(rf" \| mode auto \((\w+ \d+(, )?)+\) \| {exactness} \| seed 5$", summary)
    assert answer["text"].rstrip("\n") == text.rstrip("\n")
    assert answer["compare"]["identical"] is True
    assert answer["compare"]["plain"]["token_ids"] == answer["token_ids"]


def test_doctor_is_well_here(capfd: pytest.CaptureFixture[str]):
    code = main(["doctor", "--json"])
    report = json.loads(capfd.readouterr().out)
    assert (code, report["ok"]) == (0, True)
    found = {check["name"]: check["detail"] for check in report["checks"]}
    assert found["vocabulary"] == "the same for draft and target"
    assert found["target"].startswith(f"embedded: {DTYPE} on cpu")
    assert "GiB" in found["draft"]
    (num_slots,) = re.findall(r"of the target for (\d+) full sessions and", found["cpu memory"])
    assert SERVED_SESSIONS <= int(num_slots) <= MOST_SERVED
    for role in ("target", "draft"):
        assert re.match(r"(bits|near ties), numerics ([0-9a-f]{1,16}|unknown)(: .+\.)?$", found[f"{role} exactness"])


def test_a_missing_model_fails_the_doctor_and_thecommand(capfd: pytest.CaptureFixture[str]):
    assert main(["doctor", "--target-model", "./no-such-model"]) == 1
    out, _ = capfd.readouterr()
    assert "no-such-model" in out
    assert "fails" in out
    assert "1 differs from the defaults" in out
    assert main(["orchestrate", "--prompt", "a", "--target-model", "./no-such-model", "--mode", "plain"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "Error: There is no model folder at ./no-such-model.\n"


@pytest.mark.parametrize("arguments", [["--prompt-file", "-"], ["--logit-bias", "4096=1"]])
def test_what_only_the_model_can_refuse_is_one_sentence_and_exit_2(
    arguments: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x = 1\n" * 2000)))
    prompt = [] if "--prompt-file" in arguments else ["--prompt", "a"]
    assert main(["orchestrate", *prompt, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("Error: ")


@pytest.mark.slow
def test_a_prompt_beyond_the_context_is_one_sentence_of_our_own():
    code, out, err = run("orchestrate", "--prompt-file", "-", stdin=b"x = 1\n" * 2000)
    assert (code, out) == (2, "")
    assert re.match(r"Error: The prompt has \d{4,5} tokens and leaves no room in a context of 4096; ", err), err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_keeps_answers_and_the_same_command_goes_on(tmp_path: Path):
    source, pipe, output = tmp_path / "in.jsonl", tmp_path / "pipe", tmp_path / "out.jsonl"

    def ask(*lengths: int) -> None:
        lines = (json.dumps({"prompt": PROMPT, "max_new_tokens": length}) for length in lengths)
        source.write_text("\n".join(lines))

    ask(4, 4, 4, 3000, 3000, 3000)
    os.mkfifo(pipe)  # reading from it tells when answers have come
    given = ["orchestrate", "--prompts-file", str(source), "--mode", "plain", "--ignore-eos", "--output"]
    process = start(*given, str(pipe), "--concurrency", "2")
    with pipe.open("rb") as answers:
        lines = [answers.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert answers.read() == b""
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert b"3 of 6 prompts done" in err
    assert b"Interrupted: the answers so far are in" in err
    output.write_bytes(b"".join(lines))
    ask(4, 4, 4, 4, 4, 4)
    code, _, said = run(*given, str(output))
    assert code == 0, said
    assert output.read_bytes().startswith(b"".join(lines))
    answers_by_id = {entry["id"]: entry["text"] for entry in map(json.loads, output.read_bytes().splitlines())}
    assert answers_by_id == dict.fromkeys(range(1, 7), answers_by_id[1])
