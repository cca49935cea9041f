"""`specsplit trace`: files of several processes as one time line, in the terminal and as a picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from specsplit.cli.main import main
from specsplit.telemetry import spans
from specsplit.telemetry.setup import trace_to_file

Capture = pytest.CaptureFixture[str]
TRACE = "0a" * 16


def line(name: str, number: int, parent: int | None, start_ms: float, end_ms: float, **attributes: Any) -> str:
    """Return a span as a file has it."""
    span = {
        "name": name,
        "trace_id": TRACE,
        "span_id": f"{number:016x}",
        "parent_id": f"{parent:016x}" if parent is not None else None,
        "start_ns": round(start_ms * 1e6),
        "end_ns": round(end_ms * 1e6),
        "attributes": attributes,
    }
    return json.dumps(span) + "\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a request of two rounds as gateway, target, draft and a stage would."""
    monkeypatch.setenv("COLUMNS", "54")  # 20 columns of bars
    tokens = {"gen_ai.request.model": "small\x1b[31m", "gen_ai.usage.output_tokens": 3}
    by_file = {
        "gateway": [
            line("round", 3, 2, 0, 10, round=0, nodes=0, accepted=0),
            line("verify", 4, 3, 0, 10),
            line("propose", 6, 5, 10, 14),
            line("verify", 7, 5, 14, 20),
            line("round", 5, 2, 10, 20, round=1, nodes=4, accepted=2),
            line("request", 2, 1, 0, 20, session="5e55", **tokens),
            line("http", 1, 99, 0, 21, request="r-1"),
        ],
        "target": [line("rpc", 8, 4, 1, 9), line("forward", 9, 8, 2, 8, worker="target"), line("rpc", 10, 7, 15, 19)],
        "stage": [line("stage", 11, 10, 16, 18, stage=0)],
        "draft": [line("rpc", 12, 6, 11, 13), line("forward", 13, 12, 11, 13, worker="draft")],
    }
    paths: list[str] = []
    for name, lines in by_file.items():
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
        paths.append(str(tmp_path / name))
    return paths


def test_rounds_are_lines_to_one_scale(files: list[str], capsys: Capture) -> None:
    assert main(["trace", *files]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "request r-1: small\N{SYMBOL FOR ESCAPE}[31m, 3 tokens in 2 rounds, 20.0 ms"
    assert shown[1] == f"trace {TRACE}"
    assert shown[2:5] == [
        "  target    30% of the time computing,  50% of it waited for",
        "  stage 0   10% of the time computing",
        "  draft     10% of the time computing,  10% of it waited for",
    ]
    assert shown[6:] == [
        "   0     0/0    10.00 ms   target ░░░░████████████░░░░",
        "   1     2/4    10.00 ms   target         ░░░░░░░░░░░░",
        "                          stage 0             ████",
        "                            draft ░░████░░",
    ]


def test_a_worker_without_a_file_is_not_said_to_be_idle(files: list[str], capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "rounds.svg"
    assert main(["trace", *files[:1], *files[3:], "--svg", str(out)]) == 0  # without those of the target and its stage
    shown = capsys.readouterr().out.splitlines()
    assert shown[2:4] == [
        "  target   no spans of the target in these files; name the file of its --trace as well",
        "  draft     10% of the time computing,  10% of it waited for",
    ]
    assert ">target</text>" in out.read_text(encoding="utf-8")


def test_a_round_that_is_longer_than_the_others_is_cut(files: list[str], capsys: Capture, tmp_path: Path) -> None:
    gateway = tmp_path / "gateway"
    longer = gateway.read_text(encoding="utf-8").replace('"start_ns": 0,', '"start_ns": -30000000,')
    gateway.write_text(longer, encoding="utf-8")
    assert main(["trace", *files, "--rounds", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 more rounds; --rounds 0 shows all."
    assert main(["trace", *files]) == 0
    first = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("   0 "))
    assert first.endswith("░" * 20 + ">")


@pytest.mark.parametrize("prefix", ["r-", "5e", "0a0a"])
def test_a_request_is_found_by_its_names(files: list[str], capsys: Capture, prefix: str) -> None:
    assert main(["trace", *files, "--request", prefix]) == 0
    assert capsys.readouterr().out.startswith("request r-1")
    assert main(["trace", *files, "--request", "nobody"]) == 2
    assert "begins with nobody" in capsys.readouterr().err


def test_the_picture_has_a_lane_for_each(files: list[str], capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "rounds.svg"
    assert main(["trace", *files, "--svg", str(out)]) == 0
    drawn = ElementTree.parse(out).getroot()
    words = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"target 30%", "stage 0 10%", "draft 10%", "0 ms", "20 ms"} <= set(words)
    titles = [title.text or "" for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert "round 1: 10.00 ms, accepted 2 of 4 nodes" in titles
    assert "stage: 2.00 ms, stage 0" in titles
    assert main(["trace", *files, "--svg", str(tmp_path / "no" / "where.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_files_that_are_none_are_refused_in_one_sentence(files: list[str], capsys: Capture, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.write_text(line("round", 3, 2, 0, 10) + '{"name": "rou', encoding="utf-8")
    assert main(["trace", str(half)]) == 2
    assert "No request with a round" in capsys.readouterr().err
    wrong = tmp_path / "wrong"
    for content in ('{"a": 1}\n{}\n', "[1]\n[2]\n", line("x", 1, None, 0, 1).replace("0,", '"0",', 1) * 2):
        wrong.write_text(content, encoding="utf-8")
        assert main(["trace", files[0], str(wrong)]) == 2
        assert "Line 1 of" in capsys.readouterr().err
    wrong.write_bytes(b"\xff\xfe\n")
    assert main(["trace", str(wrong)]) == 2
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_request_that_its_client_does_not_trace_leaves_no_span(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    with trace_to_file(path):
        parent = spans.extract([("traceparent", f"00-{TRACE}-{'b' * 16}-00")])
        with spans.span("http", parent):
            request = spans.OpenSpan("request")
            spans.record("forward", request.context, 1, 2)
            assert dict(spans.inject())["traceparent"].endswith("-00"), "the workers hear of it"
            assert spans.current_span_id() == b""
            request.end({})
    assert path.read_text(encoding="utf-8") == ""
