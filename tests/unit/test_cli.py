"""The command line without a model: usage errors, help, settings printed, and what reaches a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from specsplit.cli import render
from specsplit.cli.main import main
from specsplit.cli.print_config import MASK
from specsplit.cli.prompt import read_prompt, with_prompt
from specsplit.core.settings import KEYS, Settings, load_settings
from specsplit.orchestrator.degraded import DegradedPhase, Reason
from specsplit.orchestrator.request import RequestTimings, Result, SpeculativeDecoding

Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "SPECSPLIT_DEBUG", "SPECSPLIT_CONFIG", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


def _error(arguments: list[str], capsys: Capture) -> tuple[int, str]:
    """Run a command that must fail, and return its code and the sentence; stdout has to stay empty."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return code, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "There is no prompt; write it behind the command"),
        (["--prompt", "a", "--prompt-file", "b"], "exclude each other"),
        (["b", "--prompt", "a"], "The prompt stands twice, alone and behind --prompt"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "a\udcff"], "not valid UTF-8"),
        (["--prompt-file", "no/such/file"], "cannot be read (No such file or directory)"),
        (["--prompt-file", "."], "cannot be read (Is a directory)"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be between 0 and 100"),
        (["--prompt", "a", "--temperature", "nan"], "temperature must be between 0 and 100"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be above 0"),
        (["--prompt", "a", "--logprobs", "2"], "--logprobs adds to the output of --json only"),
        (["--prompt", "a", "--json", "--logprobs", "21"], "--logprobs must be at most 20"),
        (["--prompt", "a", "--nodes", "0"], "--nodes must be at least 1"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--prompt", "a", "--logit-bias", "5"], "--logit-bias must look like ID=X"),
        (["--prompt", "a", "--chat", "--chat-template-kwargs", "{a}"], "--chat-template-kwargs must be a JSON object"),
        (["--prompt", "a", "--chat", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be an object"),
        (["--prompt", "a", "--chat", "--chat-template-kwargs", '{"a": {}}'], "chat_template_kwargs must have true or"),
        (["--prompt", "a", "--chat", "--chat-template-kwargs", '{"tools": 1}'], "must not have tools, which only"),
        (["--prompt", "a", "--chat-template-kwargs", "{}"], "template, which --chat applies; give both."),
        (["--prompt", "a", "--mode", "fast"], "--mode"),
        (["--prompt", "a", "--nodes", "many"], "--nodes"),
        (["--prompt", "a", "--top"], "--top"),
        (["--prompt", "a", "--mode", "pingpong", "--target-model", "m"], "--draft-model"),
        (["--prompt", "a", "--compare", "--target-model", "m", "--no-lookup"], "nothing to compare in plain decoding"),
        (["--prompt", "a", "--compare", "--target", "a:1", "--no-lookup"], "name a draft with --draft."),
        (["--prompt", "a", "--mode", "lookup", "--no-lookup"], "Mode lookup cannot do without lookup"),
        (["--prompt", "a", "--mode", "overlap", "--target", "a:1"], "Mode overlap needs a draft"),
        (["--prompt", "a", "--draft", "a:1"], "--draft needs a target as well"),
        (["--prompt", "a", "--target", "a:1", "--device", "cpu"], "--device is for a model loaded here and --target"),
        (["--prompt", "a", "--target", "nowhere"], "--target must be HOST:PORT"),
        (["--prompt", "a", "--config", "no/such.toml"], "cannot be read"),
        (["--prompt", "a", "--trace-file", "no/such/folder/f"], "cannot be written (No such file or directory)"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(arguments: list[str], message: str, capsys: Capture):
    code, err = _error(["orchestrate", *arguments], capsys)
    assert code == 2
    assert message in err


def test_a_prompt_file_must_be_utf_8(tmp_path: Path, capsys: Capture):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    code, err = _error(["orchestrate", "--prompt-file", str(path)], capsys)
    assert (code, "not UTF-8 (byte 2)" in err) == (2, True)


def test_an_empty_standard_input_is_no_prompt(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code, err = _error(["orchestrate", "--prompt-file", "-"], capsys)
    assert (code, "The prompt is empty" in err) == (2, True)


def test_a_prompt_may_stand_alone_or_come_from_a_pipe(monkeypatch: pytest.MonkeyPatch):
    assert with_prompt({"text": "def f(", "seed": 1}) == {"prompt": "def f(", "seed": 1}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode())))
    assert read_prompt(None, None) == "é\n"
    assert read_prompt("a", None) == "a"


def test_who_means_threads_by_t_is_told(capsys: Capture):
    code = main(["orchestrate", "a", "-t", "8", "-m", "./nowhere"])
    note, error = capsys.readouterr().err.splitlines()
    assert (code, note) == (1, "A temperature (-t) of 8 makes the text noise; CPU threads are set by --threads.")
    assert "no model folder" in error


def test_an_unknown_command_is_exit_2(capsys: Capture):
    code, err = _error(["orchestate"], capsys)
    assert (code, "orchestate" in err) == (2, True)


def test_a_missing_worker_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("specsplit.model", sys.modules["specsplit.model"])  # set again once the test has ended
    for name in [name for name in sys.modules if name.startswith("specsplit.model")]:
        monkeypatch.delitem(sys.modules, name)
    code, err = _error(["orchestrate", "--prompt", "a"], capsys)
    assert code == 1
    assert err == "Error: Running a model here needs torch: pip install 'specsplit[worker]'.\n"


def test_an_unexpected_error_is_one_sentence_and_its_traceback_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.setitem(sys.modules, "specsplit.cli.doctor", object())
    code, err = _error(["doctor"], capsys)
    assert code == 1
    assert "Set SPECSPLIT_DEBUG=1 for the traceback." in err
    monkeypatch.setenv("SPECSPLIT_DEBUG", "1")
    assert main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_groups_the_options_and_has_every_default_and_three_examples(capsys: Capture):
    assert main(["orchestrate", "--help-all"]) == 0
    out = capsys.readouterr().out
    titles = re.findall(r"^╭─ (\w+) ─", out, flags=re.MULTILINE)
    assert [title for title in titles if title not in ("Options", "Arguments")] == [
        "Prompt",
        "Sampling",
        "Speculation",
        "Models",
        "Services",
        "Output",
        "Links",
    ]
    assert out.count("[default:") == len(re.findall(r"^│ +--(?!help)", out, flags=re.MULTILINE))
    assert (
        len(
            re.findall(
                r"^ (?:cat prompt.txt \| )?specsplit orchestrate ", out[out.index("Examples:") :], flags=re.MULTILINE
            )
        )
        == 3
    )


@pytest.mark.parametrize("role", ["orchestrator", "target", "draft"])
def test_help_shows_the_defaults_that_the_settings_have(role: str, capsys: Capture):
    main(["orchestrate" if role == "orchestrator" else role, "--help-all"])
    out = capsys.readouterr().out
    assert out.count("[default:") == len(re.findall(r"^│ +--(?!help)", out, flags=re.MULTILINE))
    for field, value in getattr(Settings(), role).model_dump().items():
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            line = next(line for line in out.splitlines() if f"--{field.replace('_', '-')} " in line)
            assert f"[default: {value}]" in line


def test_print_config_shows_each_value_with_its_source_and_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.setenv("SPECSPLIT_ORCHESTRATOR_DEPTH", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    arguments = ["--nodes", "5", "--stop", 'say "a"\n', "--logit-bias", "7=-1.5", "--seed", str(2**64 - 1), "--chat"]
    arguments += ["--chat-template-kwargs", '{"enable_thinking": false, "effort": "\\"low\\"", "left_out": null}']
    assert main(["orchestrate", "--print-config", *arguments]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^nodes = 5 +# command line$", out, flags=re.MULTILINE)
    assert re.search(r"^depth = 3 +# environment$", out, flags=re.MULTILINE)
    assert re.search(r"^# dtype is not set +# default$", out, flags=re.MULTILINE)
    assert "hf_abcdefgh" not in out
    assert f"# HF_TOKEN={MASK}" in out
    path = tmp_path / "printed.toml"
    path.write_text(out, encoding="utf-8")
    assert tomllib.loads(out)["orchestrator"]["stop"] == ['say "a"\n']
    monkeypatch.delenv("SPECSPLIT_ORCHESTRATOR_DEPTH")
    again = load_settings(config=path).settings
    assert again.orchestrator.model_dump(
        include={"nodes", "depth", "logit_bias", "seed", "chat", "chat_template_kwargs"}
    ) == {
        "nodes": 5,
        "depth": 3,
        "logit_bias": ((7, -1.5),),
        "seed": 2**64 - 1,
        "chat": True,
        "chat_template_kwargs": {"enable_thinking": False, "effort": '"low"'},
    }


def test_print_config_masks_the_password_of_an_address(capsys: Capture):
    assert main(["orchestrate", "--print-config", "--json", "--target-model", "https://me:pass@word@hub/m"]) == 0
    out = capsys.readouterr().out
    printed = json.loads(out)["settings"]
    assert list(printed) == list(KEYS)
    assert printed["target.model"] == {"value": f"https://{MASK}@hub/m", "source": "command line"}
    assert "word" not in out


def test_print_config_of_a_worker_shows_its_own_role(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setenv("SPECSPLIT_DRAFT_SESSIONS", "8")
    assert main(["draft", "--print-config", "--model", "m", "--listen", "0.0.0.0:7002"]) == 0
    out = capsys.readouterr().out
    printed = tomllib.loads(out)
    assert list(printed) == ["draft"]
    assert (printed["draft"]["model"], printed["draft"]["listen"], printed["draft"]["sessions"]) == (
        "m",
        "0.0.0.0:7002",
        8,
    )


def test_doctor_reports_wrong_settings_as_a_failed_check(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setenv("SPECSPLIT_TARGET_THREADS", "none")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [check["name"] for check in report["checks"] if not check["is_ok"]] == ["settings"]


PIECES = (("def f(", False), ("x):\n    return", True), (" x\n", True))


def test_text_in_a_pipe_is_the_text():
    stream = io.StringIO()
    text = render.TextStream(stream)
    text.write([*PIECES, ("\x1b[2J\r", True)])
    text.end()
    assert text.legend is None
    assert stream.getvalue() == "def f(x):\n    return x\n\x1b[2J\r\n"


def test_a_terminal_sees_drafted_text_marked_and_blanks_left_alone():
    stream = Terminal()
    text = render.TextStream(stream)
    text.write(PIECES)
    text.end()
    assert text.legend is not None
    mark, reset = "\x1b[4;36m", "\x1b[0m"
    assert stream.getvalue() == f"def f({mark}x):{reset}\n    {mark}return{reset} {mark}x{reset}\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escapes_reach_a_terminal_that_wants_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    stream = Terminal()
    text = render.TextStream(stream)
    text.write([*PIECES, ("\x1b]0;title\x07", True)])
    assert text.legend is None
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a\tb\n", "a\tb\n"),
        ("\x1b[31m\r\x00", "␛[31m␍␀"),
        ("\x7f\x9b0m", "␡\\x9b0m"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("é€😀", "é€😀"),
    ],
)
def test_control_characters_of_the_model_become_visible(raw: str, shown: str):
    assert render.visible(raw) == shown


def test_an_answer_without_text_leaves_no_empty_line():
    stream = io.StringIO()
    text = render.TextStream(stream)
    text.write([("", True)])
    text.end()
    assert stream.getvalue() == ""


def _result(token_ids: tuple[int, ...], rate: float) -> Result:
    return Result(
        token_ids=token_ids,
        text="",
        prompt_token_ids=(1,),
        finish_reason="length",
        seed=7,
        mode="pingpong",
        timings=RequestTimings(ttft_s=0.1, decode_s=1.0, tokens_per_s=rate),
        speculative_decoding=SpeculativeDecoding(
            num_spec_steps=2, num_draft_tokens=8, num_path_tokens=4, num_accepted_draft_tokens=3
        ),
        num_rounds=2,
        target_forwards=3,
        draft_forwards=4,
        exactness="bits",
        numerics="abc",
        dtype="fp32",
    )


def test_the_summary_names_speed_acceptance_mode_and_seed():
    assert render.summary(_result((1, 2, 3), 12.5)) == (
        "3 tokens (length) | 12.5 tok/s | 1.00 tokens per target forward | 3 target forwards | "
        "accepted 3 of 4 drafted | mode pingpong | fp32 exactness bits | seed 7"
    )


def test_the_summary_names_what_was_degraded_and_for_how_long():
    phases = (
        DegradedPhase("draft", "slow", 1, 1),
        DegradedPhase("draft", "unreachable", 3, 9),
        DegradedPhase("draft", "slow", 12, 13),
    )
    line = render.summary(replace(_result((1, 2, 3), 12.5), degraded=phases))
    assert line.endswith(
        " | mode pingpong | draft slow in 3 rounds | draft unreachable in 7 rounds | fp32 exactness bits | seed 7"
    )


def test_the_summary_names_the_number_format_and_what_the_target_promises():
    line = render.summary(replace(_result((1, 2, 3), 12.5), exactness="near ties", dtype="bf16"))
    assert line.endswith(" | mode pingpong | bf16 exactness near ties | seed 7")


def test_few_accepted_nodes_in_many_plain_rounds_do_not_look_like_a_gain():
    accepted = SpeculativeDecoding(num_spec_steps=2, num_draft_tokens=2, num_path_tokens=2, num_accepted_draft_tokens=2)
    changes = {"speculative_decoding": accepted, "num_rounds": 397, "target_forwards": 398}
    result = replace(_result(tuple(range(400)), 12.5), **changes)
    assert " | 1.01 tokens per target forward | 398 target forwards | accepted 2 of 2 drafted | " in render.summary(
        result
    )
    assert result.to_dict()["tokens_per_target_forward"] == pytest.approx(400 / 398)
    assert accepted.to_dict()["mean_acceptance_length"] == 2.0, "the field's definition stays"


def test_a_text_that_ends_with_its_context_says_so():
    result = _result((1, 2, 3), 12.5)
    assert "since the context of 4 tokens is full" in (render.full_context(result, 128) or "")
    assert render.full_context(result, 3) is None
    assert render.full_context(replace(result, finish_reason="stop"), 128) is None


def test_texts_that_differ_break_a_promise_only_if_both_made_the_same():
    one, same, other = _result((1, 2), 1.0), _result((1, 2), 2.0), _result((1, 3), 1.0)
    assert render.broken_promise(one, same) is None
    assert "numerics abc" in (render.broken_promise(one, other) or "")
    for weaker in (replace(other, exactness="near ties"), replace(other, numerics="def")):
        assert render.broken_promise(one, weaker) is None
        assert render.broken_promise(weaker, one) is None


@pytest.mark.parametrize("reason", get_args(Reason))
def test_every_reason_for_a_degraded_phase_has_its_words(reason: str):
    draft, target = render.degraded(f"draft {reason}"), render.degraded(f"target {reason}")
    assert draft.startswith("The draft ")
    assert f"The draft {reason}:" not in draft
    assert target.endswith("and the text is the same.")


def test_a_note_between_text_is_dim_and_begins_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    screen, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    for stream in (screen, pipe):
        text = render.TextStream(stream)
        text.write([("a", False)])
        text.interrupt()
    render.dim_note("b")
    assert screen.getvalue() == "a\n\x1b[2mb\x1b[0m\n"
    assert pipe.getvalue() == "a"


@pytest.mark.parametrize(
    ("token_ids", "rate", "verdict"),
    [
        ((1, 2, 3), 6.25, "2.00x plain decoding, texts identical"),
        ((1, 5, 3), 6.25, "2.00x plain decoding, texts differ from token 1 on"),
        ((1, 2), 6.25, "2.00x plain decoding, texts differ from token 2 on"),
        ((1, 2, 3), 0.0, "too short to compare speeds, texts identical"),
    ],
)
def test_a_comparison_ends_with_ratio_and_agreement(token_ids: tuple[int, ...], rate: float, verdict: str):
    assert render.comparison(_result((1, 2, 3), 12.5), _result(token_ids, rate))[-1] == verdict
