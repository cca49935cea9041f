"""The generated messages are what the proto files say today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from specsplit.rpc.pb import draft_pb2, target_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_messages_are_up_to_date(tmp_path: Path):
    pytest.importorskip("grpc_tools")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    generator.generate(tmp_path)
    held = {path.name: path.read_text() for path in (ROOT / "specsplit/rpc/pb").glob("*.py*")}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == held, "run `make proto`"


def test_the_services_have_the_names_of_the_protocol():
    draft, target = (
        draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
        target_pb2.DESCRIPTOR.services_by_name["TargetService"],
    )
    assert {method.name for method in draft.methods} == {"GenerateDrafts", "Rounds", "EndSession", "Ping", "Stats"}
    assert {method.name for method in target.methods} == {
        "VerifyDrafts", "Rounds",
        "VerifyStream", "Score", "GetTokenizer", "EndSession", "Ping", "Stats",
    }  # fmt: skip
