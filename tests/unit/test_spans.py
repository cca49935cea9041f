"""Spans of one generation: what is written, when, and how a context travels to another process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsplit.telemetry import spans
from specsplit.telemetry.setup import trace_to_file


def test_spans_are_written_one_json_line_each_and_only_inside_the_block(tmp_path: Path):
    path = tmp_path / "spans.jsonl"
    with trace_to_file(path):
        with spans.span("outer", nodes=2):
            context = spans.current()
            spans.record("inner", context, 1_000_000, 3_500_000, worker="draft")
        assert spans.span("x") is not spans.span("y")
    with spans.span("later"):
        assert spans.span("x") is spans.span("y")
    inner, outer = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert inner["parent_id"] == outer["span_id"]
    assert inner["trace_id"] == outer["trace_id"]
    assert outer["parent_id"] is None
    assert (inner["start_ns"], inner["end_ns"], inner["duration_ms"]) == (1_000_000, 3_500_000, 2.5)
    assert (inner["attributes"], outer["attributes"]) == ({"worker": "draft"}, {"nodes": 2})


def test_a_span_context_travels_as_metadata_to_another_process(tmp_path: Path):
    path = tmp_path / "spans.jsonl"
    assert (spans.inject(), spans.extract([("traceparent", f"00-{1:032x}-{2:016x}-01")])) == ((), None)
    with trace_to_file(path):
        with spans.span("verify"):
            metadata = spans.inject()
            caller = spans.current_span_id()
        parent = spans.extract([*metadata, ("user-agent", "grpc"), ("token-bin", b"\xff")])
        with spans.span("rpc", parent=parent):
            assert spans.current_span_id() not in (b"", caller)
    verify, serve = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert (serve["trace_id"], serve["parent_id"]) == (verify["trace_id"], verify["span_id"])
    assert verify["span_id"] == caller.hex()


@pytest.mark.parametrize(
    "value", ["", "nonsense", f"00-{0:032x}-{1:016x}-01", "00-" + "g" * 32 + "-" + "1" * 16 + "-01"]
)
def test_a_malformed_trace_context_is_none(value: str, tmp_path: Path):
    with trace_to_file(tmp_path / "spans.jsonl"), spans.span("other"):
        assert spans.extract([("traceparent", value)]) is None


def test_an_error_inside_the_block_keeps_the_spans_written_so_far(tmp_path: Path):
    path = tmp_path / "spans.jsonl"
    with pytest.raises(KeyError), trace_to_file(path), spans.span("outer"):
        raise KeyError
    assert json.loads(path.read_text(encoding="utf-8"))["name"] == "outer"
    assert spans.span("x") is spans.span("y")


def test_values_are_quoted_as_json_wants_them(tmp_path: Path):
    path = tmp_path / "spans.jsonl"
    values = {"worker": 'a "quoted"\nline \u00fc', "nodes": -3, "max_depth": 1.5, "stage": True}
    with trace_to_file(path), spans.span("verify", **values):
        pass
    assert json.loads(path.read_text(encoding="utf-8"))["attributes"] == values


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture):
    with trace_to_file(Path("/dev/full")):
        for _ in range(1000):
            with spans.span("verify"):
                pass
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "the trace ends here, since its file cannot be written: No space left on device"
