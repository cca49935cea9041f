"""Draft, target and orchestrator as processes of their own over loopback: the same text, whatever happens to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from specsplit import Pipeline
from specsplit.cli.main import main
from specsplit.core.errors import WorkerUnreachable
from specsplit.rpc.server import serving
from specsplit.rpc.servicers import DraftService
from specsplit.telemetry import names
from tests.support.caches import use_cache
from tests.support.fakes import FakeDraft
from tests.support.machine import DTYPE
from tests.support.processes import LIMIT_S, WorkerProcess, environment, run
from tests.support.stage_processes import eventually

PROMPT = "def add(a, b):"
SHORT = ["--prompt", PROMPT, "--max-new-tokens", "24", "--json"]
PATIENT = ("--draft-patience", str(LIMIT_S))
MANY = 600  # tokens of a text that is under way for some seconds after its tenth round
LONG = ["--prompt", PROMPT, "--max-new-tokens", str(MANY), "--ignore-eos", "--json"]
Capture = pytest.CaptureFixture[str]
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    """Start a target and a draft as a user does, once for all tests; a test that ends one starts it again."""
    folder = tmp_path_factory.mktemp("workers")
    started = {role: WorkerProcess(role, folder, "--drain", "0.5", is_fresh=True) for role in ("target", "draft")}
    yield started
    for worker in started.values():
        worker.close()


@pytest.fixture
def target(workers: dict[str, WorkerProcess]) -> WorkerProcess:
    return workers["target"]


@pytest.fixture
def draft(workers: dict[str, WorkerProcess]) -> WorkerProcess:
    return workers["draft"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path_factory.getbasetemp() / "cache", monkeypatch)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """The tokens of plain decoding in process, by how many."""
    with Pipeline(mode="plain") as pipeline:
        long = pipeline.generate(PROMPT, max_new_tokens=MANY, ignore_eos=True)
    return {MANY: list(long.token_ids), 24: list(long.token_ids[:24])}


def _orchestrate(capfd: Capture, *arguments: str) -> tuple[Answer, str]:
    """Run the command in this process; return its JSON and what it said beside."""
    capfd.readouterr()
    code = main(["orchestrate", *arguments])
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out), err


def _fails(capfd: Capture, *arguments: str) -> tuple[int, str]:
    """Run a command that must fail with one sentence; return exit code and sentence."""
    capfd.readouterr()
    code = main(arguments)
    out, err = capfd.readouterr()
    assert (out, err[:7], err.count("\n")) == ("", "Error: ", 1)
    return code, err


@contextmanager
def _when_rounds_have_begun(act: Callable[[], object], folder: Path) -> Generator[Path]:
    """Call `act` from another thread as soon as the orchestrator's trace file, a pipe, shows ten rounds."""
    trace = folder / "rounds.jsonl"
    os.mkfifo(trace)

    def watch() -> None:
        with trace.open("rb") as spans:
            rounds = (line for line in spans if line.startswith(b'{"name":"round"'))
            next(islice(rounds, 9, None))
            act()
            for _ in spans:
                pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield trace
    watcher.join(timeout=LIMIT_S)
    assert not watcher.is_alive()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_says_once_that_it_serves_and_where(role: str, workers: dict[str, WorkerProcess]):
    ready = workers[role].ready
    host, port = ready["address"].split(":")
    measured = {name: ready[name] for name in ("address", "threads")}
    assert ready == {"event": "ready", "role": role, "model": "embedded", **measured}
    assert ready["threads"] >= 1
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_both_workers_give_the_text_of_plain_decoding_and_count_the_bytes(
    target: WorkerProcess, draft: WorkerProcess, expected: dict[int, list[int]], capfd: Capture
):
    addresses = ("--target", target.address, "--draft", draft.address)
    # A busy machine may pause the draft twice for longer than its usual time, after which `auto` leaves it out.
    for mode, excused in (("auto", {"slow"}), ("pingpong", set[str]())):
        answer, err = _orchestrate(capfd, *addresses, *PATIENT, "--mode", mode, *SHORT)
        assert (answer["token_ids"], answer["mode"], answer["resyncs"], err) == (expected[24], mode, [], "")
        assert {row["reason"] for row in answer["degraded"]} <= excused
    wire = answer["wire"]
    assert wire["rounds"] == answer["num_rounds"] + 1
    assert wire["sent_bytes"] == wire["draft"]["sent_bytes"] + wire["target"]["sent_bytes"]
    assert all(0 < count < 400 * wire["rounds"] for peer in ("draft", "target") for count in wire[peer].values())
    again, _ = _orchestrate(capfd, *addresses, *SHORT, "--compare")
    assert (again["compare"]["identical"], again["mode"]) == (True, "auto")
    assert again["compare"]["plain"]["wire"]["draft"] == {"sent_bytes": 0, "received_bytes": 0}


def test_sampled_text_is_that_of_one_process(target: WorkerProcess, draft: WorkerProcess, capfd: Capture):
    sampled = [*SHORT, "--temperature", "1", "--top-p", "0.95", "--seed", "7", "--presence-penalty", "0.5"]
    remote, _ = _orchestrate(capfd, "--target", target.address, "--draft", draft.address, *sampled)
    local, _ = _orchestrate(capfd, *sampled)
    assert (remote["token_ids"], "wire" in local) == (local["token_ids"], False)


def test_a_target_alone_speculates_on_the_text_and_says_so(
    target: WorkerProcess, expected: dict[int, list[int]], capfd: Capture
):
    answer, err = _orchestrate(capfd, "--target", target.address, *SHORT)
    assert (answer["token_ids"], answer["mode"], answer["draft_forwards"]) == (expected[24], "auto", 0)
    assert err == "No draft for this target: guessing from the text alone; name one with --draft.\n"
    answer, err = _orchestrate(capfd, "--target", target.address, *SHORT, "--mode", "plain")
    assert (answer["token_ids"], err) == (expected[24], "")


def test_an_orchestrator_needs_no_torch_and_no_cache(
    target: WorkerProcess, draft: WorkerProcess, expected: dict[int, list[int]]
):
    program = (
        "import sys; from specsplit.cli.main import main; code = main();"
        "print(code, sys.modules.get('torch'), file=sys.stderr)"
    )
    arguments = ["orchestrate", "--target", target.address, "--draft", draft.address, *SHORT]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        env=environment(XDG_CACHE_HOME="/dev/null"),
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stderr == b"0 None\n"
    assert json.loads(done.stdout)["token_ids"] == expected[24]


def test_the_tokenizer_is_fetched_once(
    target: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["--target", target.address, "--mode", "plain", *SHORT]
    first, _ = _orchestrate(capfd, *arguments)
    (folder,) = (tmp_path / "specsplit" / "tokenizers").iterdir()
    kept = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "tokenizer.json" in kept
    assert _orchestrate(capfd, *arguments)[0]["text"] == first["text"]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == kept
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    assert _orchestrate(capfd, *arguments)[0]["text"] == first["text"]


def test_one_trace_goes_through_three_processes(
    target: WorkerProcess, draft: WorkerProcess, tmp_path: Path, capfd: Capture
):
    path = tmp_path / "spans.jsonl"
    answer, _ = _orchestrate(
        capfd,
        *("--target", target.address, "--draft", draft.address, *PATIENT, *SHORT),
        *("--mode", "pingpong", "--trace-file", str(path)),
    )
    ours = _spans(path)
    (trace_id,) = {span["trace_id"] for span in ours if span["name"] == "request"}
    by_id = {span["span_id"]: span for span in ours}
    for worker, caller, forwards in ((target, "verify", "target_forwards"), (draft, "propose", "draft_forwards")):
        served: list[Answer] = []

        def has_written(worker: WorkerProcess = worker, served: list[Answer] = served, of: str = forwards) -> bool:
            theirs = {span["span_id"]: span for span in _spans(worker.trace) if span["trace_id"] == trace_id}
            by_id.update(theirs)
            served[:] = [span for span in theirs.values() if span["name"] == "forward"]
            return len(served) >= answer[of] and all(span["parent_id"] in by_id for span in served)

        asyncio.run(eventually(has_written))  # a worker writes its spans a little after they end
        assert len(served) == answer[forwards]
        for span in served:
            call = by_id[span["parent_id"]]
            assert (call["name"], by_id[call["parent_id"]]["name"]) == ("rpc", caller)
    assert {span["name"] for span in by_id.values()} <= names.SPANS.keys()
    assert {name for span in by_id.values() for name in span["attributes"]} <= names.ATTRIBUTES.keys()


def _spans(path: Path) -> list[Answer]:
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def test_the_python_api_takes_addresses(target: WorkerProcess, draft: WorkerProcess, expected: dict[int, list[int]]):
    before = set(threading.enumerate())
    with Pipeline(target=target.address, draft=draft.address, max_new_tokens=24) as pipeline:
        result = pipeline.generate(PROMPT)
        assert "".join(chunk.text for chunk in pipeline.stream(PROMPT)) == result.text
    assert list(result.token_ids) == expected[24]
    assert result.wire is not None
    with pytest.raises(WorkerUnreachable):
        Pipeline(target="127.0.0.1:1", retry=0)
    assert {thread for thread in threading.enumerate() if thread.name.startswith("specsplit")} <= before


def test_doctor_looks_at_the_services(target: WorkerProcess, draft: WorkerProcess, capfd: Capture):
    assert main(["doctor", "--target", target.address, "--draft", draft.address, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    found = {check["name"]: check for check in report["checks"]}
    assert found["target"]["detail"].startswith(
        f"{target.address}: embedded: {DTYPE} on cpu, vocabulary 4096, context "
    )
    assert found["vocabulary"]["detail"] == "the same for draft and target"
    assert {"target version", "target clock", "draft version", "draft clock", "context"} <= found.keys()
    assert {"target exactness", "draft exactness"} <= found.keys()
    assert not any(check["is_warning"] for check in report["checks"])
    assert main(["doctor", "--target", draft.address, "--draft", "127.0.0.1:1", "--json"]) == 1
    failed = {check["name"]: check["detail"] for check in json.loads(capfd.readouterr().out)["checks"]}
    assert "is a draft (embedded), but a target is needed" in failed["target"]
    assert "cannot be reached" in failed["draft"]


def test_a_worker_of_the_wrong_role_is_refused_by_name(target: WorkerProcess, draft: WorkerProcess, capfd: Capture):
    code, err = _fails(capfd, "orchestrate", "--target", draft.address, "--mode", "plain", *SHORT)
    assert (code, f"At {draft.address} is a draft (embedded), but a target is needed" in err) == (1, True)
    code, err = _fails(capfd, "orchestrate", "--target", target.address, "--draft", target.address, *SHORT)
    assert (code, f"At {target.address} is a target (embedded), but a draft is needed" in err) == (1, True)


def test_an_address_that_refuses_is_given_up_after_the_time_allowed(capfd: Capture):
    began_s = time.monotonic()
    capfd.readouterr()
    code = main(["orchestrate", "--target", "127.0.0.1:1", "--mode", "plain", "--retry", "2", *SHORT])
    out, err = capfd.readouterr()
    note, error = err.splitlines()
    assert (code, out, note[-4:] in ("1 s.", "2 s.")) == (1, "", True)
    assert note[:-4] == "The target at 127.0.0.1:1 cannot be reached (the connection is refused); trying again for "
    assert error.startswith("Error: The target at 127.0.0.1:1 cannot be reached: the connection is refused")
    assert time.monotonic() - began_s < LIMIT_S / 4


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--listen", "{target}"], 2, "{target} is in use; stop what listens there, or choose another port"),
        (["--listen", "192.0.2.1:7001", "--insecure"], 2, "Nothing can listen at 192.0.2.1:7001"),
        (
            ["--listen", "192.0.2.1:7001"],
            2,
            "192.0.2.1:7001 can be reached from other machines, and without certificates",
        ),
        (["--listen", "7001"], 2, "--listen must be HOST:PORT"),
        (["--sessions", "0"], 2, "--sessions must be at least 1"),
        (["--model", "./no-such-model"], 1, "There is no model folder at ./no-such-model."),
        (["--trace-file", "no/such/folder/f"], 2, "cannot be written (No such file or directory)"),
    ],
)
def test_a_worker_that_cannot_serve_says_why(
    arguments: list[str], code: int, message: str, target: WorkerProcess, capfd: Capture
):
    filled = [argument.format(target=target.address) for argument in arguments]
    found, err = _fails(capfd, "draft", *filled)
    assert found == code
    assert message.format(target=target.address) in err


async def test_a_draft_of_another_vocabulary_is_refused_naming_both(target: WorkerProcess):
    async with serving("127.0.0.1:0", [DraftService(FakeDraft())]) as strange:
        arguments = ["--target", target.address, "--draft", strange.address]
        code, out, err = await asyncio.to_thread(run, "orchestrate", *arguments, *SHORT)
        assert (code, out) == (1, "")
        assert "and the target embedded have different vocabularies" in err
        assert err.count("\n") == 1
        code, out, _ = await asyncio.to_thread(run, "doctor", *arguments, "--json")
    assert code == 1
    failed = [check["name"] for check in json.loads(out)["checks"] if not check["is_ok"]]
    assert failed == ["vocabulary"]


def test_a_draft_killed_midway_costs_speed_only(
    target: WorkerProcess, draft: WorkerProcess, expected: dict[int, list[int]], tmp_path: Path, capfd: Capture
):
    arguments = ["--target", target.address, "--draft", draft.address, "--mode", "pingpong", *LONG]
    with _when_rounds_have_begun(draft.kill, tmp_path) as trace:
        answer, _ = _orchestrate(capfd, *arguments, "--trace-file", str(trace))
    draft.start()
    assert answer["token_ids"] == expected[MANY]
    assert 0 < answer["draft_forwards"] < answer["target_forwards"] * 2
    phases = [phase for phase in answer["degraded"] if phase["worker"] == "draft"]
    assert {phase["reason"] for phase in phases} <= {"unreachable", "slow"}
    assert phases[-1]["last_round"] > phases[0]["first_round"]
    assert all(phase["worker"] == "draft" for phase in answer["degraded"])


def test_a_draft_that_is_not_there_is_noted_once(target: WorkerProcess, expected: dict[int, list[int]], capfd: Capture):
    arguments = ["--target", target.address, "--draft", "127.0.0.1:1", "--prompt", PROMPT, "--max-new-tokens", "24"]
    capfd.readouterr()
    assert main(["orchestrate", *arguments]) == 0
    _, err = capfd.readouterr()
    note, summary = err.splitlines()
    assert note == "The draft cannot be reached: going on without it until it is of use again."
    assert "24 tokens (length)" in summary
    assert " | draft unreachable in " in summary


@pytest.mark.slow
def test_a_target_restarted_on_its_port_midway_gives_the_same_text(
    target: WorkerProcess, draft: WorkerProcess, expected: dict[int, list[int]], tmp_path: Path, capfd: Capture
):
    arguments = ["--target", target.address, "--draft", draft.address, *LONG]

    def restart() -> None:
        target.kill()
        target.start()

    with _when_rounds_have_begun(restart, tmp_path) as trace:
        answer, _ = _orchestrate(capfd, *arguments, "--trace-file", str(trace), "--retry", str(LIMIT_S))
    assert answer["token_ids"] == expected[MANY]
    assert ("target", "unreachable") in {(phase["worker"], phase["reason"]) for phase in answer["degraded"]}
    (resync,) = [each for each in answer["resyncs"] if each["worker"] == "target" and each["num_tokens"]]
    assert 16 < resync["num_tokens"] < 307


def test_a_worker_told_to_stop_under_load_drains_and_says_what_it_cut(
    target: WorkerProcess, draft: WorkerProcess, expected: dict[int, list[int]], tmp_path: Path, capfd: Capture
):
    arguments = ["--target", target.address, "--draft", draft.address, "--mode", "pingpong", *LONG]
    codes: list[int] = []
    with _when_rounds_have_begun(lambda: codes.append(draft.stop(signal.SIGINT)), tmp_path) as trace:
        answer, _ = _orchestrate(capfd, *arguments, "--trace-file", str(trace))
    assert answer["token_ids"] == expected[MANY]
    assert {phase["worker"] for phase in answer["degraded"]} == {"draft"}
    trace.unlink()
    capfd.readouterr()
    with _when_rounds_have_begun(lambda: codes.append(target.stop()), tmp_path) as trace:
        plain = ["--target", target.address, "--mode", "plain", *LONG, "--retry", "0", "--trace-file", str(trace)]
        code = main(["orchestrate", *plain])
    out, err = capfd.readouterr()
    assert (code, out, codes) == (1, "", [0, 3]), "without its draft a text goes on, without its target it ends"
    assert err.startswith("Error: The target ")
    for worker, notes in ((target, ["1 answer was cut after 0.5 s; a longer --drain helps."]), (draft, [])):
        assert worker.rest_of_stdout() == b""
        draining = "Draining for up to 0.5 s; a second signal ends at once."
        logs = (" specsplit.sessions: ", " specsplit.model.")  # of those refused or lost; of the load
        said = [line for line in worker.stderr.splitlines() if not any(log in line for log in logs)]
        assert said == [draining, *notes]


@pytest.mark.slow
def test_a_second_signal_ends_a_worker_that_is_still_draining():
    program = (
        "import asyncio; from specsplit.cli.main import main; from specsplit.rpc.server import Server;"
        "Server.drain = lambda self, grace_s: asyncio.sleep(grace_s);"  # a call that does not end
        "main(['draft', '--drain', '600'])"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b'"ready"' in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        line = next(line for line in process.stderr if b" INFO " not in line)  # what it loaded is logged before
        assert line.startswith(b"Draining for up to 600 s")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 128 + signal.SIGTERM
