"""`specsplit chat` as a user runs it: in a terminal, over pipes, and against an endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specsplit import Pipeline
from specsplit.core.defaults import EMBEDDED
from specsplit.model.source import resolve
from specsplit.model.tokenizer import TransformersTokenizer
from tests.support.gateways import GatewayProcess
from tests.support.processes import LIMIT_S, environment, run, start

OPTIONS = ("--dtype", "fp32", "--threads", "1", "--context", "512", "--draft-vocab", "3000")
PROMPT = "\x1b[0m>"
MESSAGES = ("Write a loop max_tokens=20 seed=5 temperature=0", "Now another one. max_tokens=16 seed=6 temperature=0.7")


def chat(*arguments: str, lines: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Chat over pipes, in a forked process; the one in a terminal is started as a user does."""
    content = "".join(f"{line}\n" for line in lines).encode()
    return subprocess.CompletedProcess(arguments, *run("chat", *arguments, stdin=content, OMP_NUM_THREADS="1"))


def saved(path: Path) -> list[str]:
    return [message["content"] for message in json.loads(path.read_text())]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return what plain decoding says to the messages, each behind those before it."""
    tokenizer = TransformersTokenizer(AutoTokenizer.from_pretrained(resolve(EMBEDDED, "target")[0]), ())
    with Pipeline(dtype="fp32", threads=1, context=512, mode="plain") as pipeline:
        asked = [{"role": "user", "content": "Write a loop"}]
        first = pipeline.generate(tokenizer.encode_messages(asked), max_new_tokens=20, seed=5).text
        asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "Now another one."}]
        ids = tokenizer.encode_messages(asked)
        return [first, pipeline.generate(ids, max_new_tokens=16, seed=6, temperature=0.7).text]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    started = GatewayProcess(tmp_path_factory.mktemp("gateway"), *OPTIONS)
    yield started
    started.close()


def test_answers_follow_the_whole_conversation(tmp_path: Path, expected: list[str]):
    path = tmp_path / "chat.json"
    done = chat(*OPTIONS, lines=(*MESSAGES, "/nope", "Hi top_p=7", f"/save {path}", "/stats", "/quit", "unread"))
    assert done.returncode == 0, done.stderr
    assert saved(path) == ["Write a loop", expected[0], "Now another one.", expected[1]]
    assert done.stdout.startswith(expected[0]), "stdout has the answers and nothing else"
    assert "2 answers | " in done.stderr
    assert "There is no command /nope" in done.stderr
    assert done.stderr.count("Error: ") == 2, "a wrong parameter ends no chat and leaves no message"


def test_a_gateway_starts_its_draft_with_the_tokens_that_were_named(gateway: GatewayProcess):
    assert gateway.ready["models"] == ["embedded"]
    words = words_of_workers(gateway)
    assert words[words.index("--draft-vocab") + 1] == "3000"
    assert words[words.index("--context") + 1] == "512", "the target's, which its draft follows"


def words_of_workers(gateway: GatewayProcess) -> list[str]:
    """Return the command that serves the target and the draft which the gateway has started."""
    children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text(encoding="ascii")
    commands = [Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8").split("\0") for child in children.split()]
    (both,) = (words for words in commands if "--draft-model" in words)
    return both


@pytest.mark.slow
def test_an_endpoint_gives_the_same_answers(tmp_path: Path, gateway: GatewayProcess, expected: list[str]):
    path = tmp_path / "chat.json"
    done = chat("--endpoint", gateway.url, lines=(*MESSAGES, f"/save {path}", "Hi top_p=7"))
    assert done.returncode == 0, done.stderr
    assert saved(path) == ["Write a loop", expected[0], "Now another one.", expected[1]]
    assert "Model embedded at" in done.stderr
    assert "20 tokens | " in done.stderr
    assert "Error: " in done.stderr


@pytest.mark.slow
def test_raw_text_goes_on_where_it_ended(tmp_path: Path):
    path = tmp_path / "chat.json"
    with Pipeline(dtype="fp32", threads=1, context=512, mode="plain") as pipeline:
        first = pipeline.generate("def add(a, b):", max_new_tokens=8).text
        second = pipeline.generate(f"def add(a, b):{first}# ", max_new_tokens=8).text
    done = chat(*OPTIONS, "--raw", "--max-new-tokens", "8", lines=("def add(a, b):", "# ", f"/save {path}"))
    assert saved(path) == ["def add(a, b):", first, "# ", second], done.stderr


def test_a_line_that_is_no_text_ends_no_chat(tmp_path: Path):
    path = tmp_path / "chat.json"
    typed = f"caf\xe9\ndef max_tokens=2\n/save {path}\n".encode("latin-1")
    code, _, err = run("chat", *OPTIONS, "--raw", stdin=typed, OMP_NUM_THREADS="1")
    assert code == 0, err
    assert "Error: The prompt is not valid UTF-8; convert it first." in err
    assert saved(path)[0] == "def"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--endpoint", "ftp://x"), "--endpoint needs a URL"),
        (("--endpoint", "http://127.0.0.1:9"), "cannot be reached (Connection refused)."),
        (("--endpoint", "http://127.0.0.1:abc"), "--endpoint needs a URL"),
        (("--endpoint", "http://[::1"), "--endpoint needs a URL"),
        (("--endpoint", "http://127.0.0.1:9/\u00fc"), "--endpoint needs a URL"),
        (("--endpoint", "http://x", "--target", "x:1"), "--endpoint and --target exclude each other"),
        (
            (
                "--endpoint",
                "http://x",
                "--dtype",
                "fp32",
                "--seed",
                "1",
                "--system",
                "x",
                "--mode",
                "plain",
                "--insecure",
            ),
            "--endpoint and --dtype, --mode, --insecure exclude each other",
        ),
        (("--temperature", "-1"), "temperature"),
        (("--system", "caf\udce9"), "is not valid UTF-8; convert it first."),
        (("--raw", "--chat-template-kwargs", "{}"), "--chat-template-kwargs and --raw exclude each other"),
        (("--chat-template-kwargs", "{x"), "--chat-template-kwargs must be a JSON object, such as"),
        (
            ("--chat-template-kwargs", '{"enable_thinking": false}'),
            "does not read enable_thinking; it reads nothing but",
        ),
    ],
)
def test_what_cannot_be_chatted_with_is_one_sentence(arguments: tuple[str, ...], said: str):
    done = chat(*arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


class Endpoint(ThreadingHTTPServer):
    """A server of OpenAI's HTTP that answers with fixed events and keeps what it was asked."""

    def __init__(
        self, *events: str, before: str = "data: ", models: str = '{"data": [{"id": "m\\u001b[31m"}]}'
    ) -> None:
        self.bodies: list[dict[str, object]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(models)

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                endpoint.bodies.append(json.loads(self.rfile.read(length)))
                self._send("".join(f"{before}{event}\n\n" for event in events))

            def _send(self, body: str) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def chat(self, *arguments: str, lines: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        """Chat with it, and end it."""
        try:
            return chat("--endpoint", self.url, *arguments, lines=lines)
        finally:
            self.shutdown()
            self.server_close()


def test_an_endpoint_that_breaks_off_ends_the_answer_only():
    endpoint = Endpoint('{"choices": [{"delta": {"content": "Hal"}}]}', '{"error": {"message": "It broke."}}')
    done = endpoint.chat(lines=("Hi", "/stats"))
    assert done.returncode == 0
    assert done.stdout == "Hal\n"
    assert "Error: It broke." in done.stderr
    assert "\x1b" not in done.stderr, "names of a peer cannot command the terminal"


@pytest.mark.parametrize(
    ("last", "is_whole"),
    [("[DONE]", True), ('{"error": null, "choices": [{"delta": {}, "finish_reason": "stop"}]}', True), ("", False)],
    ids=["done", "reason", "cut"],
)
def test_an_answer_without_an_end_was_cut_off(last: str, is_whole: bool):
    endpoint = Endpoint('{"choices": [{"delta": {"content": "Hal"}}]}', last, before="data:")
    done = endpoint.chat(lines=("Hi",))
    assert done.stdout == "Hal\n"
    assert ("broke off (the answer has no end)" in done.stderr) != is_whole, done.stderr


WRONG_TYPE = "has another type than in OpenAI's API"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"choices": null, "usage": {"completion_tokens": 1}}', ""),
        ('{"choices": [{"delta": null}], "usage": null}', ""),
        ('{"choices": 7}', f"broke off (its choices {WRONG_TYPE})"),
        ('{"choices": ["x"]}', f"its choices {WRONG_TYPE}"),
        ('{"choices": [], "usage": [1]}', f"its usage {WRONG_TYPE}"),
        ('{"choices": [], "usage": {"completion_tokens": "12"}}', f"its completion_tokens {WRONG_TYPE}"),
        ('{"choices": [], "usage": {"completion_tokens": 1%s}}' % ("0" * 400), "completion_tokens are no number of"),
        ('{"choices": [{"delta": "x"}]}', f"its delta {WRONG_TYPE}"),
        ('{"choices": [{"text": 7}]}', f"its text {WRONG_TYPE}"),
        ('{"choices": [{"speculative": {"pieces": [["x", true]]}}]}', f"its pieces {WRONG_TYPE}"),
        ('{"choices": %s' % ("[" * 100_000), "broke off"),
    ],
)
def test_an_event_of_another_shape_does_not_hold_up_the_chat(event: str, said: str):
    done = Endpoint('{"choices": [{"delta": {"content": "Hal"}}]}', event, "[DONE]").chat(lines=("Hi", "/stats"))
    assert done.returncode == 0, done.stderr
    assert (done.stdout, said in done.stderr, "Traceback" in done.stderr) == ("Hal\n", True, False), done.stderr
    assert "tok/s" in done.stderr, "it went on to the next line"


@pytest.mark.parametrize("models", ['{"data": ["m"]}', '{"data": [{}]}', '{"data": 7}', "[" * 100_000])
def test_a_list_of_models_of_another_shape_is_one_sentence(models: str):
    done = Endpoint(models=models).chat(lines=("Hi",))
    assert done.returncode == 1
    assert "lists no models as OpenAI's does" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_an_endpoint_is_sent_what_the_user_has_set_and_nothing_else():
    endpoint = Endpoint('{"choices": [{"delta": {"content": "Hal"}}]}', "[DONE]")
    lines = ("Hi", "Hi top_p=0.9 max_tokens=7", "/seed 5", "temperature=1.5", "temperature=101", "Hi")
    options = ("--top-k", "4", "--presence-penalty", "0.5", "--chat-template-kwargs", '{"enable_thinking": false}')
    done = endpoint.chat(*options, lines=lines)
    assert done.returncode == 0, done.stderr
    base = {"top_k", "presence_penalty", "chat_template_kwargs", "model", "stream", "stream_options", "messages"}
    more = set[str](), {"top_p", "max_tokens"}, {"seed", "temperature"}
    assert [set(body) for body in endpoint.bodies] == [base | names for names in more]
    last = endpoint.bodies[-1]
    assert (last["top_k"], last["presence_penalty"], last["seed"], last["temperature"]) == (4, 0.5, 5, 1.5)
    assert last["chat_template_kwargs"] == {"enable_thinking": False}
    assert "temperature must be between 0 and 100" in done.stderr, "refused where it was set, and not kept"


def test_ctrl_c_at_the_prompt_of_a_pipe_says_how_to_leave():
    endpoint = Endpoint('{"choices": [{"delta": {"content": "Hal"}}]}', "[DONE]")
    process = start("chat", "--endpoint", endpoint.url, stdin=subprocess.PIPE)
    late = threading.Timer(LIMIT_S, process.kill)
    late.start()
    try:
        assert process.stdin is not None
        assert process.stderr is not None
        for line in (b"/stats\n", b"Hi\n", b"Hi\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert any(b"tok/s" in said for said in iter(process.stderr.readline, b"")), "no answer"
            process.send_signal(signal.SIGINT)
            assert b"Ctrl-D or /quit leaves." in process.stderr.readline()
        out, err = process.communicate(b"", LIMIT_S)
        assert (process.wait(), out, err) == (0, b"Hal\nHal\n", b"")
    finally:
        late.cancel()
        process.kill()
        endpoint.shutdown()
        endpoint.server_close()


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specsplit", "chat", *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=environment(OMP_NUM_THREADS="1", TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1"),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, after: int = 0) -> int:
        """Wait until the terminal has shown `text` behind `after`; return where it ends."""
        ends_s = time.monotonic() + LIMIT_S
        while text not in self.seen[after:]:
            assert time.monotonic() < ends_s, self.seen
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
        # What came in one piece with it is still to be waited for.
        return self.seen.index(text, after) + len(text)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def type_until(self, keys: str, is_done: Callable[[], bool]) -> None:
        """Type the keys, again where the prompt was not ready to take them."""
        ends_s = time.monotonic() + LIMIT_S
        while not is_done():
            assert time.monotonic() < ends_s, self.seen
            self.type(keys)
            if select.select([self._master], [], [], 0.5)[0]:
                with contextlib.suppress(OSError):  # it has left
                    self.seen += os.read(self._master, 65536).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_program():
    terminal = Terminal("--dtype", "fp32", "--threads", "1", "--mode", "pingpong")
    try:
        shown = terminal.wait_for(PROMPT)
        terminal.type("Write a long text max_tokens=3000 ignore_eos=true temperature=1\r")
        shown = terminal.wait_for("\x1b[4;36m", shown)
        terminal.process.send_signal(signal.SIGINT)
        shown = terminal.wait_for("Ended.", shown)
        terminal.wait_for(PROMPT, shown)
        terminal.type("Hi max_tokens=3\r")
        shown = terminal.wait_for("3 tokens (length)", shown)
        terminal.wait_for(PROMPT, shown)
        terminal.type_until("\x1b[A", lambda: "Hi max_tokens=3" in terminal.seen[shown:])  # the last line again
        terminal.type_until("\x03", lambda: "Ctrl-D or /quit leaves." in terminal.seen[shown:])
        terminal.type_until("\x04", lambda: terminal.process.poll() is not None)
        assert terminal.process.returncode == 0, terminal.seen
    finally:
        terminal.close()
