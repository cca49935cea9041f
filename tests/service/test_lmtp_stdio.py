"""LMTP over stdin and stdout that are no pair of pipes in good order: a device, closed, left, or cut in a line."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from pathlib import Path

import pytest

from specsplit.cli.main import main
from specsplit.engine import event_loop
from specsplit.gateway.lmtp.session import LmtpServer
from specsplit.gateway.lmtp.stdio import serve_stdio
from specsplit.gateway.models import ModelTable
from specsplit.limits import MAX_FRAME_BYTES
from tests.support.fakes import FakeTarget
from tests.support.lmtp_channels import served
from tests.support.processes import LIMIT_S
from tests.support.rpc_servers import wait_until

ASKED = {"stream_id": 1, "prompt": [1], "max_tokens": 5, "ignore_eos": True}


def answered(source: Path) -> list[str]:
    """Return the frames that a client gets whose stdin is `source`; it is served on the command's own event loop."""
    sink = io.BytesIO()

    async def serve() -> None:
        server = LmtpServer(ModelTable([await served(FakeTarget())]))
        with source.open("rb") as opened:
            await asyncio.wait_for(serve_stdio(server, opened, sink), LIMIT_S)
            assert os.fstat(opened.fileno()), "the descriptor stays its owner's"

    event_loop.run(serve())
    return sink.getvalue().decode().splitlines()


def test_a_device_or_a_file_ends_as_a_pipe_does(tmp_path: Path) -> None:
    assert answered(Path(os.devnull)) == []
    file = tmp_path / "frames"
    file.write_text(f"GENERATE {json.dumps(ASKED)}\n", encoding="utf-8")
    assert len(answered(file)) == 5


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_that_is_too_long_is_refused(end: str, tmp_path: Path) -> None:
    file = tmp_path / "frames"
    file.write_text("GENERATE ".ljust(MAX_FRAME_BYTES + 100_000, "x") + end, encoding="utf-8")
    (said,) = answered(file)
    assert f"at most {MAX_FRAME_BYTES} bytes" in said


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_closed_stdin_or_stdout_is_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, name, None)
    assert main(["lmtp", "--stdio"]) == 2
    assert "one of them is closed" in capsys.readouterr().err


async def test_a_client_that_reads_no_more_frees_its_slots() -> None:
    target, (there, here), (reads, writes) = FakeTarget(), os.pipe(), os.pipe()
    model = await served(target)
    with os.fdopen(there, "rb") as source, os.fdopen(writes, "wb", buffering=0) as sink:
        serving = asyncio.create_task(serve_stdio(LmtpServer(ModelTable([model])), source, sink))
        os.write(here, f"GENERATE {json.dumps(ASKED | {'max_tokens': 400})}\n".encode())
        await wait_until(lambda: target.num_tokens > 0)
        os.close(reads)
        async with asyncio.timeout(LIMIT_S):
            await serving
        assert not target.slots
        assert target.num_tokens < 400
        os.close(here)
