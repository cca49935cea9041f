"""`device-rates`: forwards of random models of real shapes on a GPU, beside its memory's bandwidth and `generate`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.report import console as report
from benchmarks.research.app import app
from benchmarks.research.origin import origin_for
from benchmarks.research.real_shapes.shapes import LLAMA_1B, LLAMA_8B, QWEN3_06B
from specsplit.core.errors import InvalidRequest
from specsplit.model.attention.metadata import SequenceInput
from specsplit.model.backends.eager import EagerBackend
from specsplit.model.kv_cache import KVCache
from specsplit.model.probe import probe
from specsplit.model.runner import Runner
from specsplit.model.weight_format import WeightFormat, weight_format

Record = dict[str, Any]
SHAPES = {"qwen3-0.6b": QWEN3_06B, "llama-3.2-1b": LLAMA_1B, "llama-3.1-8b": LLAMA_8B}
_COPIED_BYTES = 1 << 30
_REPEATS = 15
_ROOM = 256


@app.command("device-rates")
def device_rates(
    shape: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(SHAPES)}.")] = "qwen3-0.6b",
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    context: Annotated[str, typer.Option(help="Tokens in front of a step, separated by commas.")] = "512,4096",
    rows: Annotated[str, typer.Option(help="Tokens of a step, separated by commas.")] = "1,4,8,16,64",
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of `generate`.")] = 64,
    dtype: Annotated[str, typer.Option(help="bf16, int8 or int4, separated by commas.")] = "bf16",
    static: Annotated[bool, typer.Option(help="Also `generate` with a static cache, which compiles the model.")] = True,
    output: Annotated[Path | None, typer.Option(help="Append the JSON line; only from a clean commit.")] = None,
) -> None:
    """Time forwards of models with random weights, made in the device's memory, and transformers' `generate`."""
    origin = origin_for(output)
    console = report.new_console()
    steps = [(int(length), int(count)) for length in context.split(",") for count in rows.split(",")]
    forms = [None if name == "bf16" else weight_format(name) for name in dtype.split(",")]
    if forms.count(None) != dtype.split(",").count("bf16"):
        raise InvalidRequest(f"--dtype takes bf16, int8 and int4, not {dtype}.", param="dtype")
    wanted = _Wanted(torch.device(device), steps, forms, tokens, static)
    copy_gb_s = _copy_rate(wanted.device) / 1e9
    found: Record = {"device": torch.cuda.get_device_name(wanted.device), "copy_gb_s": copy_gb_s}
    console.print(f"{found['device']}: a copy reads and writes {copy_gb_s:.0f} GB/s")
    found["shapes"] = {name: _measured(SHAPES[name], wanted, copy_gb_s, console) for name in shape.split(",")}
    report.emit({"benchmark": "device-rates", "provenance": origin, **found}, output)


@dataclass(frozen=True, slots=True)
class _Wanted:
    device: torch.device
    steps: Sequence[tuple[int, int]]
    """Tokens in front of a step, and tokens of it."""
    forms: Sequence[WeightFormat | None]
    """Formats that the weights are rounded to; None leaves them in bf16."""
    tokens: int
    has_static: bool


def _measured(values: Record, wanted: _Wanted, copy_gb_s: float, console: Console) -> Record:
    found: Record = {}
    for form in wanted.forms:
        model = _made(values, wanted.device)
        of_form: Record = {}
        if form is None:
            of_form["generate_tokens_s"] = rates = _generate_rates(model, wanted.tokens, wanted.has_static)
            console.print(f"{values['model_type']}: tokens/s of generate {rates}")
        of_form |= _forwards(model, wanted.steps, form, copy_gb_s, console)
        found[form or "bf16"] = of_form
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _read_bytes(runner: Runner) -> int:
    """Return the bytes of the weights that a forward of one row reads."""
    model: Any = runner.model
    embedding = model.get_input_embeddings().weight
    is_tied = any(each is embedding for each in model.get_output_embeddings().parameters())
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) - runner.saved_bytes
    return weights - (0 if is_tied else embedding.numel() * embedding.element_size())


@torch.inference_mode()
def _forwards(
    model: PreTrainedModel,
    steps: Sequence[tuple[int, int]],
    form: WeightFormat | None,
    copy_gb_s: float,
    console: Console,
) -> Record:
    """Return the times of forwards as the worker makes them."""
    probed = probe(model)
    shapes = [(layer.key_shape, layer.value_shape) for layer in probed.layers]
    most = max(length for length, _ in steps) + _ROOM
    cache = KVCache(shapes, 1, most, dtype=model.dtype, device=model.device)
    runner = Runner(EagerBackend(model, probed), cache, most)
    start_s = time.perf_counter()
    if form is not None:
        runner.round(form)
    round_s, weight_bytes = time.perf_counter() - start_s, _read_bytes(runner)
    copy_s = weight_bytes / copy_gb_s / 1e9
    found: Record = {"weight_bytes": weight_bytes, "round_s": round_s, "is_recorded": runner.record(), "steps": []}
    found["record_s"] = time.perf_counter() - start_s - round_s
    console.print(
        f"{form or 'bf16'}: {weight_bytes / 1e9:.2f} GB, rounded in {round_s:.1f} s; graphs: {found['is_recorded']}, "
        f"{found['record_s']:.1f} s"
    )
    for length, count in steps:
        prompt, step = [SequenceInput(0, 0, list(range(length)))], [_step(length, count)]
        prefill_s = median(_seconds(lambda prompt=prompt: runner.forward(prompt), 3))
        forward_s = median(_seconds(lambda step=step: runner.forward(step), _REPEATS))
        share = copy_s / forward_s
        record = {"context": length, "rows": count, "prefill_ms": prefill_s * 1e3, "forward_ms": forward_s * 1e3}
        found["steps"].append({**record, "bandwidth_share": share})
        console.print(
            f"context {length}, {count} rows: {forward_s * 1e3:.3f} ms, {share:.2f} of the copy's rate; "
            f"prefill {prefill_s * 1e3:.1f} ms"
        )
    found["kernels"] = _kernels(lambda: runner.forward([_step(steps[0][0], 1)]))
    for name, count, microseconds in found["kernels"]["longest"]:
        console.print(f"  {count:5} x {microseconds:8.1f} us  {name}", markup=False)
    console.print(f"{found['kernels']['count']} kernels a forward, {found['kernels']['busy_us']:.0f} us")
    return found


def _step(length: int, count: int) -> SequenceInput:
    return SequenceInput(0, length, list(range(count)), num_logits=count)


def _made(values: Record, device: torch.device) -> PreTrainedModel:
    config = AutoConfig.for_model(**values, dtype="bfloat16", bos_token_id=None, eos_token_id=None)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def _generate_rates(model: Any, tokens: int, static: bool) -> dict[str, float]:
    """Return transformers' tokens a second behind 512 tokens, with a dynamic and a static cache."""
    prompt = torch.arange(512, device=model.device)[None]

    def rate(**options: Any) -> float:
        def run(count: int) -> None:
            mask = torch.ones_like(prompt)
            model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=count, **options)

        both = [median(_seconds(lambda count=count: run(count), 3)) for count in (1, tokens)]
        return (tokens - 1) / (both[1] - both[0])

    found = {"dynamic": rate()}
    if static:
        found["static, compiled"] = rate(cache_implementation="static")
        torch._dynamo.reset()
    return found


def _seconds(run: Callable[[], object], count: int) -> list[float]:
    """Return the times of some runs behind one that warms up."""
    taken: list[float] = []
    for number in range(count + 1):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if number:
            taken.append(time.perf_counter() - start_s)
    return taken


def _copy_rate(device: torch.device) -> float:
    """Return the bytes a second that a copy within the device's memory reads and writes."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / median(_seconds(lambda: target.copy_(source), _REPEATS))


def _kernels(run: Callable[[], object]) -> Record:
    """Return how many kernels a run launches, how long they take, and the longest of them, by name."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [(each.key, each.count, each.device_time_total) for each in seen.key_averages()]
    events = sorted((each for each in events if each[2] > 0), key=lambda each: -each[2])
    count, busy_us = sum(each[1] for each in events), sum(each[2] for each in events)
    return {"count": count, "busy_us": busy_us, "longest": [(name[:80], n, us) for name, n, us in events[:16]]}
