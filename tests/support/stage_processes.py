"""Stages as processes of their own or served here, the targets over them, and what those say; for tests."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from specsplit.cli.main import main
from specsplit.core.sections import StageSettings
from specsplit.stages.loading import load_stage
from specsplit.stages.serve import serving_stage
from tests.support.processes import LIMIT_S, ROOT, WorkerProcess

EMBEDDED_TARGET = ROOT / "specsplit" / "model" / "embedded" / "target"
PROMPT = "def read_lines(path):\n"
SAMPLED = ("--temperature", "1.0", "--top-p", "0.9")


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something that other processes do has come about."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - other processes set no event here
            await asyncio.sleep(0.02)


def stage_process(folder: Path, layers: str, *arguments: str) -> WorkerProcess:
    """Start a stage; its logs lie in a folder of its own."""
    own = folder / f"stage-{len(list(folder.iterdir()))}"
    own.mkdir(parents=True)
    return WorkerProcess("stage", own, "--layers", layers, "--threads", "1", *arguments)


@contextmanager
def served_stages(*stages: StageSettings) -> Iterator[list[str]]:
    """Serve stages on a loop of their own for the length of the block, and give their addresses."""
    shards = [load_stage(stage) for stage in stages]
    addresses: list[str] = []
    loop, is_serving, is_over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        try:
            async with AsyncExitStack() as stack:
                for shard, settings in zip(shards, stages, strict=True):
                    addresses.append((await stack.enter_async_context(serving_stage(shard, settings))).address)
                is_serving.set()
                await is_over.wait()
        finally:
            is_serving.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_serving.wait(LIMIT_S)
        yield addresses
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()


def altered_model(folder: Path, tensor: str, at: float) -> Path:
    """Return a copy of the embedded target in which 256 bytes of a tensor differ, `at` (0 to 1) of its way."""
    shutil.copytree(EMBEDDED_TARGET, folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])[tensor]["data_offsets"]
    first = 8 + length + start + int((end - start) * at) // 256 * 256
    content[first : first + 256] = b"\x00\x3f" * 128  # 0.5 each, in bfloat16
    path.write_bytes(content)
    return folder


def generated(capfd: Any, *arguments: str) -> list[int]:
    """Run `specsplit orchestrate` here and return the token ids."""
    code = main(["orchestrate", "--prompt", PROMPT, "--max-new-tokens", "48", "--ignore-eos", "--seed", "5", "--json",
                 "--no-lookup", *arguments])  # fmt: skip
    out, err = capfd.readouterr()
    assert code == 0, err
    token_ids: list[int] = json.loads(out)["token_ids"]
    return token_ids


def sent_again(target: WorkerProcess) -> list[tuple[str, int]]:
    """Return the reason and tokens of everything that a coordinator says it sent again, in order."""
    found = re.findall(r"sent again: (\d+) tokens of slot \d+ \((\w+)\)", target.stderr)
    return [(reason, int(num_tokens)) for num_tokens, reason in found]


def local_pids(target: WorkerProcess) -> dict[int, int]:
    """Return the latest process of each stage that a target has started, by the stage's index."""
    found = re.findall(r"^Stage (\d+) \(layers [0-9:]+\) serves at \S+, process (\d+)\.$", target.stderr, re.MULTILINE)
    return {int(index): int(pid) for index, pid in found}


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, collected by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def close_all(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.close()
