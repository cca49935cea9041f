"""Measures plain decoding behind a long prompt: seconds, and memory beside the loaded model and its keys and values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.environment import Neighbours
from benchmarks.peers.ours import InProcess, OnLoop
from benchmarks.processes import Child
from benchmarks.settings import Pair, ServedMode
from benchmarks.systems import Task
from specsplit.assembly.models import load_models
from specsplit.core.sections import OrchestratorSettings
from specsplit.core.settings import Settings, TargetSettings, override

Record = dict[str, Any]
_FORGET_PEAK = "5"
"""What Linux wants written, so that the largest resident memory counts from now on."""


class PlainTarget(InProcess):
    """Plain decoding of one session in a context of its own length."""

    def __init__(self, threads: int, pair: Pair, context: int) -> None:
        OnLoop.__init__(self)
        chosen = {"model": pair.target, "dtype": pair.dtype, "threads": threads, "context": context, "sessions": 1}
        self._settings = Settings(
            target=TargetSettings.model_validate({**chosen, "prefix_reuse": "off"}),
            orchestrator=override(OrchestratorSettings(), mode="plain"),
        )
        self._models = load_models(self._settings)
        self._modes = [ServedMode("plain", "plain", lookup=False)]

    def memory(self) -> Record:
        """Return the bytes that are resident, those that were at the most since the last call, and pages of files."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        rss, peak, file = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM", "RssFile"))
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        return {"rss_bytes": rss, "peak_bytes": peak, "file_bytes": file}

    def sizes(self, num_tokens: int) -> Record:
        """Return the bytes of the weights, of the rows that so many tokens take, and of all rows."""
        cache = self._models.target.runner.cache
        return {
            "weight_bytes": self._models.target.weight_bytes,
            "kv_bytes": cache.rows_for(num_tokens) * cache.row_bytes,
            "kv_plan_bytes": cache.num_bytes,
        }


def measure(pair: Pair, task: Task, threads: int, room: int) -> Record:
    """Answer one prompt in a process of its own; `work_bytes` is what it held at the most beside the loaded model."""
    context = len(task.prompt_ids) + task.num_tokens + room
    with Child("plain decoding", partial(PlainTarget, threads, pair, context)) as child:
        [system] = child.wait_systems()
        loaded = child.ask("memory")
        neighbours = Neighbours([child.pid])
        sample = system.generate(task)
        neighbours_share = neighbours.share()
        read = child.ask("memory")
        sizes = child.ask("sizes", len(task.prompt_ids) + task.num_tokens)
    assert sample.ttft_s is not None, "our systems tell when the first token came"
    assert sample.decode_s is not None, "and how long the others took"
    return {
        "context": len(task.prompt_ids),
        "ttft_s": sample.ttft_s,
        "tokens_per_s": (task.num_tokens - 1) / sample.decode_s,
        "loaded": loaded,
        "read": read,
        **sizes,
        "neighbours_share": neighbours_share,
        "work_bytes": read["peak_bytes"] - loaded["rss_bytes"] - sizes["kv_bytes"],
    }
