"""Values of other programs, such as -1 for no limit: one sentence says what to write here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specsplit import InvalidSettings, Pipeline
from specsplit.assembly.requests import request_settings
from specsplit.cli.main import main
from specsplit.core.sections import OrchestratorSettings
from specsplit.model import extra


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("orchestrate a -n -1", "--max-new-tokens cannot be -1; a number as large as the context goes on to the end"),
        ("orchestrate a -c 0", "--context cannot be 0; leave it out for the model's own."),
        ("orchestrate a -s -1", "--seed cannot be -1; leave it out for a random one."),
        ("orchestrate a --dtype bfloat16", "--dtype must be one of fp32, bf16, fp16, int8, int4, not 'bfloat16'; here"),
        ("serve --dtype auto", "not 'auto'; leave it out for the checkpoint's own. See --help."),
        (
            "orchestrate a --draft ./small",
            "--draft cannot be ./small; it takes the HOST:PORT of a worker, and --draft-",
        ),
        ("orchestrate a --target Qwen/Qwen3-8B", "HOST:PORT of a worker, and -m takes a model."),
        ("serve --target ./large", "--target cannot be ./large; it takes the HOST:PORT of a worker, and -m takes"),
        ("orchestrate a -d small-host:7002", "--draft-model cannot be small-host:7002; it takes a model, and --draft"),
        ("orchestrate a -m host:7001", "-m cannot be host:7001; it takes a model, and --target takes the HOST:PORT"),
    ],
)
def test_a_value_of_others_is_answered_with_ours(arguments: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert said in err


@pytest.mark.parametrize("arguments", ["-m small -d org/small -s 0 -n 1 -c 2", "--target chat=a:1", "--target a:1"])
def test_a_value_that_may_be_right_is_left_alone(arguments: str, capsys: pytest.CaptureFixture[str]):
    # Each goes on to the check after it.
    command = "serve" if "=" in arguments else "orchestrate a"
    assert main([*command.split(), *arguments.split(), "--print-config"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype cannot be bfloat16; here it is bf16."),
        ({"dtype": "auto"}, "dtype cannot be auto; leave it out for the checkpoint's own."),
        ({"max_new_tokens": -1}, "max_new_tokens cannot be -1; a number as large as the context goes on"),
        ({"device": 0}, "device cannot be 0; here it is cuda:0."),
        ({"target_model": "text-generation"}, "target_model cannot be text-generation; leave the task out, and name"),
        ({"target": "org/name"}, "target cannot be org/name; it takes the HOST:PORT of a worker, and target_model"),
    ],
)
def test_in_python_it_is_answered_too(given: dict[str, Any], said: str):
    with pytest.raises(InvalidSettings, match=f"^{re.escape(said)}"):
        Pipeline(**given)


def test_a_request_is_answered_too():
    with pytest.raises(InvalidSettings, match=r"^seed cannot be -1; leave it out for a random one\.$"):
        request_settings(OrchestratorSettings(), {"seed": -1})


@pytest.mark.parametrize(
    "make", [lambda: Pipeline(dtype="fp8"), lambda: request_settings(OrchestratorSettings(), {"mode": "x"})]
)
def test_a_traceback_has_none_of_pydantics_words(make: Any):
    with pytest.raises(InvalidSettings) as caught:
        make()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_torch_for_cpus_is_told_from_a_gpu_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extra.metadata, "version", lambda name: "2.13.0+cpu")
    extra.check_device("cpu")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(extra.DeviceUnavailable, match=r"by torch 2\.13\.0\+cpu, a build for CPUs: install the one"):
            extra.check_device(device)
    # Whether another build finds a GPU is asked of torch itself.
    monkeypatch.setattr(extra.metadata, "version", lambda name: "2.13.0")
    extra.check_device("cuda")
