"""The words of other programs: messages and the page for who comes from them say the same, and name what there is."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from specsplit import InvalidSettings, Pipeline
from specsplit.assembly.other_names import OTHER_NAMES, answer_about
from specsplit.assembly.requests import request_settings
from specsplit.cli.commands import app
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import GATEWAY_KEYS
from tests.support.forked import ROOT

PAGE = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
COMMANDS = getattr(get_command(app), "commands")  # noqa: B009  (a group of the parser; its class has no public name)
OURS = {param.name for command in COMMANDS.values() for param in getattr(command, "params", ())}


def test_what_an_answer_names_is_an_option_of_some_command():
    named: set[str] = set()
    for name in OTHER_NAMES:
        answer_about(name, lambda setting: named.add(setting) or setting)
    assert len(named) > 10
    assert named <= OURS


def test_no_answer_is_about_a_name_of_ours():
    assert OTHER_NAMES & GATEWAY_KEYS.keys() == set()


def test_an_option_of_others_on_the_page_has_an_answer():
    left = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    options = {name.replace("-", "_") for cell in left for name in re.findall(r"--([a-z][a-z-]+)", cell)}
    assert len(options) > 30
    assert options - OURS - OTHER_NAMES == set()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("assistant_model", "There is no setting assistant_model; here it is draft_model."),
        ("max_model_len", "There is no setting max_model_len; here it is context."),
        ("trust_remote_code", "There is no setting trust_remote_code; code from a model's repository is never run."),
    ],
)
def test_an_argument_of_others_is_answered_with_ours(name: str, said: str):
    with pytest.raises(InvalidSettings, match=f"^{re.escape(said)}$"):
        Pipeline(**{name: "x"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_length", "There is no setting max_length; here it is max_new_tokens, which does not count the prompt."),
        ("do_sample", "There is no setting do_sample; here it is temperature, which samples if it is above 0."),
        ("output_scores", "There is no setting output_scores; here it is logprobs."),
        ("input_ids", "There is no setting input_ids; the prompt stands first: a text, or token ids as a list."),
        ("draft_model", "draft_model is set for all requests, where the models are named."),
        ("audit", "audit is set for all requests, where the models are named."),
        ("retry", "retry is set for all requests, where the models are named."),
        ("tls_cert", "tls_cert is set for all requests, where the models are named."),
    ],
)
def test_an_option_of_a_request_is_answered_too(name: str, said: str):
    with pytest.raises(InvalidSettings, match=f"^{re.escape(said)}$"):
        request_settings(OrchestratorSettings(), {name: "x"})
