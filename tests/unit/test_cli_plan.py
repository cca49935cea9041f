"""`specsplit plan`: what it prints, where it finds a config.json, what it refuses, and that it needs no weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specsplit.cli.main import main

Capture = pytest.CaptureFixture[str]
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
NUM_PARAMS = 596_049_920


@pytest.fixture
def config(tmp_path: Path) -> str:
    return _written(tmp_path, CONFIG)


def _written(folder: Path, content: object) -> str:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def _json(arguments: list[str], capsys: Capture) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    return json.loads(out)


def _error(arguments: list[str], capsys: Capture) -> tuple[int, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return code, err


def test_the_table_has_a_row_per_stage_and_says_what_it_assumes(config: str, capsys: Capture):
    assert main(["plan", "--model", config, "--layers", "0:20,20:28", "--context", "4096", "--sessions", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert f"qwen3, {NUM_PARAMS:,} parameters in 28 layers, bf16, ends on the stages" in " ".join(lines[0])
    # 20 x 15,730,944 + 151,936 x 1,024 parameters; 2 slots of 4,608 rows; 5 tokens of 1,024 numbers; all 2 bytes each
    assert lines[2] == ["0", "0:20", "20", "0.876", "0.703", "1.6", "10.0", "KiB", "embedding"]
    assert lines[3] == ["1", "20:28", "8", "0.524", "0.281", "0.805", "picks", "head"]
    assert lines[4][:3] == ["all", "0:28", "28"]
    notes = "\n".join(" ".join(line) for line in lines[5:])
    slots = "2 slots of 4608 rows (a context of 4096, 128 tree nodes, in whole blocks)"
    for words in (slots, "Sliding windows", "4 nodes and their root", "headers", "activations"):
        assert words in notes


def test_json_holds_the_same_in_bytes(config: str, capsys: Capture):
    record = _json(["--model", config, "--num-stages", "3", "--nodes", "8", "--context", "1000"], capsys)
    assert (record["num_parameters"], record["num_layers"], record["dtype"]) == (NUM_PARAMS, 28, "bf16")
    assert record["kv_bytes_per_token_and_layer"] == 2 * 8 * 128 * 2
    assert [(stage["start"], stage["end"]) for stage in record["stages"]] == [(0, 10), (10, 19), (19, 28)]
    assert [stage["link_bytes_per_round"] for stage in record["stages"]] == [1024 * 2 * 9] * 2 + [0]
    assert record["stages"][1]["kv_bytes"] == 9 * 4096 * 4 * 1152
    tied_copy = 151936 * 1024
    assert sum(stage["weight_bytes"] for stage in record["stages"]) == 2 * (NUM_PARAMS + tied_copy)
    assert record["total_bytes"] == sum(stage["total_bytes"] for stage in record["stages"])


def test_ends_on_the_coordinator_have_a_row_of_their_own(config: str, capsys: Capture):
    assert main(["plan", "--model", config, "--memory", "1GiB,2GiB", "--ends", "coordinator"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == ["coordinator", "-", "0", "0.290", "-", "0.290", "-", "10.0", "KiB", "embedding,", "head"]
    assert [line[0] for line in lines[3:6]] == ["0", "1", "all"]
    assert lines[4][-3:] == ["2.0", "10.0", "KiB"]  # the budget, then hidden states instead of picks
    record = _json(["--model", config, "--ends", "coordinator"], capsys)
    assert record["coordinator"] == {"weight_bytes": 2 * (151936 * 1024 + 1024), "link_bytes_per_round": 5 * 2048}


@pytest.mark.parametrize("form", ["file", "folder", "embedded"])
def test_a_config_is_found_as_a_file_a_folder_or_the_embedded_one(form: str, config: str, capsys: Capture):
    source = {"file": config, "folder": str(Path(config).parent), "embedded": "embedded"}[form]
    assert _json(["--model", source], capsys)["model_type"] == ("llama" if form == "embedded" else "qwen3")


def test_a_hub_id_is_read_from_the_cache_alone(tmp_path: Path):
    """In a process of its own, since the hub's client takes its cache folder once, when it is imported."""
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    _written(snapshot, CONFIG)
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text("abc", encoding="utf-8")
    program = "import sys; from specsplit.cli.main import main; sys.exit(main(sys.argv[1:]))"

    def planned(source: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, "plan", "--model", source, "--json"]
        environment = {"HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert json.loads(planned("some/model").stdout)["num_parameters"] == NUM_PARAMS
    missing = planned("some/other")
    assert missing.returncode == 1
    assert "no model of that name in the hub's cache here; pass the path of its config.json." in missing.stderr


def test_help_and_a_missing_config_import_no_torch():
    program = (
        "import sys; from specsplit.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = [name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules]; "
        "sys.exit(9 if heavy else code)"
    )
    for arguments, code in ((["--help"], 0), (["--model", "./nowhere"], 1)):
        command = [sys.executable, "-c", program, "plan", *arguments]
        assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == code


def test_what_a_config_says_is_the_default(config: str, tmp_path: Path, capsys: Capture):
    record = _json(["--model", config], capsys)
    assert (record["context"], record["sessions"], record["dtype"], len(record["stages"])) == (4096, 4, "bf16", 1)
    short = _written(tmp_path, {**CONFIG, "max_position_embeddings": 512, "torch_dtype": "float32"})
    record = _json(["--model", short], capsys)
    assert (record["context"], record["dtype"]) == (512, "fp32")


def test_a_context_beyond_the_models_is_planned_and_told(config: str, capsys: Capture):
    record = _json(["--model", config, "--context", "65536"], capsys)
    assert "The model was made for at most 40960 tokens: a target refuses a longer --context." in record["notes"]


def test_int8_says_what_it_assumes(config: str, capsys: Capture):
    record = _json(["--model", config, "--dtype", "int8"], capsys)
    assert [note for note in record["notes"] if "int8: a byte for each weight" in note and "are in bf16" in note]
    assert record["kv_bytes_per_token_and_layer"] == 4096
    half = _json(["--model", config, "--dtype", "int4"], capsys)
    assert [note for note in half["notes"] if "int4: half a byte for each weight" in note]
    assert half["stages"][0]["weight_bytes"] < record["stages"][0]["weight_bytes"]
    wide = _json(["--model", config, "--dtype", "int4", "--compute-dtype", "fp32"], capsys)
    assert wide["kv_bytes_per_token_and_layer"] == 2 * 4096
    assert [note for note in wide["notes"] if "KV and hidden states are in fp32" in note]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--num-stages", "0"], 2, "There must be at least 1 stage, not 0."),
        (["--num-stages", "29"], 2, "29 stages are too many for 28 layers"),
        (["--num-stages", "2", "--layers", "0:28"], 2, "--num-stages and --layers exclude each other"),
        (["--layers", "0:14,15:28"], 2, "There is a gap: layer 14 would be in no stage."),
        (["--layers", "0:14,14:29"], 2, "goes beyond the last layer"),
        (["--layers", ""], 2, "'' is no such range"),
        (["--memory", "24"], 2, "--memory must be a size such as 24GiB or 24GB, not 24."),
        (["--memory", "8GiB,"], 2, "--memory must be a size such as 24GiB or 24GB, not empty."),
        (["--memory", "1GiB", "--context", "40960"], 1, "What would fit: "),
        (["--context", "1"], 2, "context must be at least 2, not 1."),
        (["--sessions", "0"], 2, "sessions must be at least 1, not 0."),
        (["--nodes", "-1"], 2, "nodes must be at least 0, not -1."),
        (["--dtype", "fp8"], 2, "--dtype"),
        (["--ends", "nowhere"], 2, "--ends"),
    ],
)
def test_wrong_usage_and_what_does_not_fit_is_one_sentence(
    arguments: list[str], code: int, message: str, config: str, capsys: Capture
):
    got, err = _error(["--model", config, *arguments], capsys)
    assert (got, message in err) == (code, True), err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON."),
        ("[" * 100_000, "is not valid JSON."),
        ("[]", "holds no JSON object"),
        ({}, "names no model_type."),
        ({"model_type": "mamba"}, "mamba models have layers without a KV cache that rolls back"),
        ({**CONFIG, "num_hidden_layers": 10**12}, "has a num_hidden_layers that is no such number (1000000000000)."),
    ],
)
def test_a_config_that_cannot_be_planned_says_why(content: object, message: str, tmp_path: Path, capsys: Capture):
    code, err = _error(["--model", _written(tmp_path, content)], capsys)
    assert (code, message in err) == (1, True), err


@pytest.mark.parametrize("source", ["./nowhere", "nowhere.json", "some/where/else"])
def test_a_missing_config_is_named(source: str, capsys: Capture):
    assert _error(["--model", source], capsys) == (1, f"Error: There is no config.json at {source}.\n")


def test_a_folder_without_a_config_and_a_name_that_is_none_are_named(tmp_path: Path, capsys: Capture):
    assert _error(["--model", str(tmp_path)], capsys) == (1, f"Error: There is no config.json at {tmp_path}.\n")
    code, err = _error(["--model", "not a name"], capsys)
    assert (code, "neither a config.json, nor a model folder, nor a hub id" in err) == (1, True)


def test_help_shows_every_default_and_three_examples(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    options = [line for line in out.splitlines() if line.startswith("│ --") and "--help" not in line]
    assert len(options) == 12
    assert all("[default: " in line for line in options)
    assert out.count("specsplit plan --model") == 3


def test_the_first_layers_stay_on_the_coordinators_machine(config: str, capsys: Capture) -> None:
    planned = _json(["--model", config, "--num-stages", "2", "--private-first", "5"], capsys)
    assert (planned["private_first"], planned["ends"]) == (5, "coordinator")
    stages = planned["stages"]
    assert [(stage["start"], stage["end"]) for stage in stages] == [(0, 5), (5, 17), (17, 28)]
    assert not any(stage["has_embedding"] or stage["has_head"] for stage in stages)
    assert "Stage 0 (layers 0:5) runs on the coordinator's own machine" in planned["notes"][-1]
    by_hand = _json(
        ["--model", config, "--layers", "0:5,5:17,17:28", "--ends", "coordinator", "--private-first", "5"], capsys
    )
    assert by_hand["stages"] == stages
    assert by_hand["total_bytes"] == planned["total_bytes"]
    assert main(["plan", "--model", config, "--num-stages", "2", "--private-first", "5"]) == 0
    assert re.search(r"^own +0:5 +5 ", capsys.readouterr().out, re.MULTILINE)


def test_budgets_are_for_the_stages_elsewhere(config: str, capsys: Capture) -> None:
    planned = _json(["--model", config, "--memory", "1GiB,2GiB", "--context", "4096", "--private-first", "3"], capsys)
    assert [stage["budget_bytes"] for stage in planned["stages"]] == [None, 2**30, 2**31]
    assert [stage["start"] for stage in planned["stages"]][:2] == [0, 3]
    assert planned["stages"][-1]["end"] == 28
    assert all(stage["total_bytes"] <= stage["budget_bytes"] for stage in planned["stages"][1:])
    assert main(["plan", "--model", config, "--memory", "1GiB,2GiB", "--private-first", "3"]) == 0
    assert re.search(r"^own .* - ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--private-first", "0"], "must be between 1 and 27 of 28 layers, not 0"),
        (["--private-first", "28"], "must be between 1 and 27 of 28 layers, not 28"),
        (["--private-first", "2", "--ends", "stages"], "needs --ends coordinator"),
        (["--private-first", "2", "--layers", "0:3,3:28"], "has to be 0:2, not 0:3."),
        (["--private-first", "2", "--num-stages", "27"], "27 stages are too many for 26 layers"),
        (["--private-first", "2", "--memory", "1MiB"], "26 layers in bf16"),
        (["--private-first", "2", "--memory", "1MiB,9GiB"], " GiB more on stage 1."),
    ],
)
def test_private_layers_that_cannot_be(config: str, capsys: Capture, arguments: list[str], sentence: str) -> None:
    code, error = _error(["--model", config, *arguments], capsys)
    assert code in (1, 2)
    assert sentence in error
