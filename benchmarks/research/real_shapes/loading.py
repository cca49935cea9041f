"""How long a process takes from its start to its first token, and what it holds then; ours and transformers' own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.settings import Pair

Record = dict[str, Any]
_COMMON = """
import json, os, time
def told():
    seconds = time.monotonic() - START_S
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    kb = lambda name: int(status[name].split()[0]) * 1024
    print(json.dumps(dict(seconds=seconds, rss_bytes=kb("VmRSS"), file_bytes=kb("RssFile"), peak_bytes=kb("VmHWM"))))
"""
_OURS = """
import torch
from specsplit.api import Pipeline
torch.set_num_threads(THREADS)
with Pipeline(target_model=TARGET, mode="plain", dtype="bf16", threads=THREADS, context=2048, sessions=1) as pipeline:
    pipeline.generate("def add(a, b):", max_new_tokens=1, temperature=0)
    told()
"""
_THEIRS = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(THREADS)
tokenizer = AutoTokenizer.from_pretrained(TARGET)
model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
with torch.inference_mode():
    logits = model(torch.tensor([tokenizer.encode("def add(a, b):")]), logits_to_keep=1).logits
    tokenizer.decode(logits[0, -1].argmax().item())
told()
"""
_IMPORT = """
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
told()
"""
PROGRAMS = {"ours": _OURS, "transformers": _THEIRS, "import": _IMPORT}


def measure(pair: Pair, threads: int, *, is_reversed: bool = False) -> Record:
    """Run each program once in a process of its own, in turn or in reversed order.

    Returns its seconds from the start to the first token, those until its end, and its bytes behind the first token.
    """
    found: Record = {}
    weight_bytes = sum(file.stat().st_size for file in Path(pair.target).glob("*.safetensors"))
    for name, program in reversed(PROGRAMS.items()) if is_reversed else PROGRAMS.items():
        start_s = time.monotonic()  # Linux has one such clock for all processes
        chosen = (_COMMON + program).replace("START_S", repr(start_s))
        chosen = chosen.replace("THREADS", str(threads)).replace("TARGET", repr(pair.target))
        done = subprocess.run([sys.executable, "-c", chosen], capture_output=True, text=True, check=True, timeout=280)
        found[name] = {**json.loads(done.stdout.splitlines()[-1]), "whole_s": time.monotonic() - start_s}
    return {**found, "weight_bytes": weight_bytes}
