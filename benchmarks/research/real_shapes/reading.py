"""What plain decoding behind a long prompt takes: seconds, and memory beside what weights and keys and values need."""

from __future__ import annotations

import resource
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
        """Return the bytes that are resident, those that were at the most since the last call, and those planned."""
        lines = Path("/proc/self/statm").read_text().split()
        peak_kb = next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
        )
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        target = self._models.target
        return {
            "rss_bytes": int(lines[1]) * resource.getpagesize(),
            "peak_bytes": peak_kb * 1024,
            "weight_bytes": target.weight_bytes,
            "kv_bytes": target.runner.cache.num_bytes,
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
    assert sample.ttft_s is not None, "our systems tell when the first token came"
    return {
        "context": len(task.prompt_ids),
        "ttft_s": sample.ttft_s,
        "tokens_per_s": (task.num_tokens - 1) / (sample.wall_s - sample.ttft_s),
        "weight_bytes": loaded["weight_bytes"],
        "kv_bytes": loaded["kv_bytes"],
        "loaded_bytes": loaded["rss_bytes"],
        "peak_bytes": read["peak_bytes"],
        "neighbours_share": neighbours_share,
        "work_bytes": read["peak_bytes"] - loaded["rss_bytes"] - read["kv_bytes"],
    }
