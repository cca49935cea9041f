"""The evaluation stage: measures the pair, holds it against the bars, writes evaluation.json and the model card."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import workloads
from benchmarks.research.train_pair import acceptance, corpus, model, tokenizer
from benchmarks.research.train_pair.card import write_card
from benchmarks.research.train_pair.data import Stream
from benchmarks.research.train_pair.evaluate import HeldOut
from benchmarks.research.train_pair.files import write_whole
from benchmarks.research.train_pair.stages import Run

BARS = {"cpu": {"loss": 0.70, "greedy": 3.2, "coupled": 2.4}, "cuda": {"loss": 0.60, "greedy": 3.5, "coupled": 2.6}}
"""Held-out nats per byte at most; mean acceptance lengths of a chain of 4 at T=0 and T=1 at least."""
MIN_GAP = 0.10
"""Nats per byte by which the draft is worse: a pair that agrees because both are bad does not count."""
MAX_LOADING_S = 1.0
MAX_WEIGHT_BYTES = 32_000_000


def evaluate(run: Run) -> dict[str, Any]:
    """Measure the pair in the workspace; return what evaluation.json holds."""
    space, recipe, machine = run.space, run.recipe, run.machine
    for folder, stage in ((space.target, "target"), (space.draft, "distill")):
        space.require(folder / "model.safetensors", stage)
    target = model.load(space.target).to(machine.device).requires_grad_(False)
    draft = model.load(space.draft).to(machine.device).requires_grad_(False)
    sizes = tokenizer.bytes_of_tokens(tokenizer.load(space.tokenizer))
    held_out = HeldOut.of(Stream.open(space.held_out_tokens), sizes, recipe.held_out_windows)
    bare = HeldOut.of(Stream.open(space.held_out_code_tokens), sizes, recipe.held_out_windows)
    run.tell("loss and agreement on held-out text")
    losses = {"target": held_out.loss(target), "draft": held_out.loss(draft)}
    losses["target_without_headers"] = bare.loss(target)
    agreement = held_out.agreement(target, draft)
    documents = corpus.read(space.require(space.corpus, "corpus"))
    models, loading_s = acceptance.load_pair(space.target, space.draft, machine.threads)
    measured = acceptance.measure(
        models,
        workloads.read_prompts(workloads.CODE_PROMPTS, recipe.num_prompts),
        acceptance.held_out_prompts(documents, recipe.num_prompts),
        recipe.num_table_prompts,
        run.tell,
    )
    found: dict[str, Any] = {"loss": losses, "agreement_on_human_text": agreement, "loading_s": loading_s, **measured}
    found["weight_bytes"] = sum(path.stat().st_size for path in space.pair.rglob("*.safetensors"))
    found["bars"] = bars(found, space.record())
    write_whole(space.evaluation, json.dumps(found, indent=1).encode())
    write_card(space, found)
    for bar in found["bars"]:
        run.tell(f"{'holds' if bar['holds'] else 'FAILS'}  {bar['name']}: {bar['value']} (bar {bar['bar']})")
    return found


def bars(found: dict[str, Any], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each bar with its value; which bars apply depends on the device that trained the target."""
    on_gpu = record.get("target", {}).get("device", "cpu") != "cpu"
    wanted = BARS["cuda" if on_gpu else "cpu"]
    target, draft = (found["loss"][name]["nats_per_byte"] for name in ("target", "draft"))
    greedy, coupled = (found[f"code_prompts_T{name}"]["mean_acceptance_length"] for name in ("0", "1"))
    samples = found["samples"]
    readable = sum(sample["brackets_match"] and sample["indentation_is_coherent"] for sample in samples)
    return [
        _at_most("target, nats per byte", target, wanted["loss"]),
        _at_least("draft worse by, nats per byte", draft - target, MIN_GAP),
        _at_least("chain of 4, greedy: mean acceptance length", greedy, wanted["greedy"]),
        _at_least("chain of 4, T=1: mean acceptance length", coupled, wanted["coupled"]),
        _at_least("answers with coherent brackets and indentation", readable, len(samples)),
        _at_most("both weights files, bytes", found["weight_bytes"], MAX_WEIGHT_BYTES),
        _at_most("loading both, seconds", found["loading_s"], MAX_LOADING_S),
    ]


def _at_most(name: str, value: float, bar: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "bar": f"<= {bar}", "holds": value <= bar}


def _at_least(name: str, value: float, bar: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "bar": f">= {bar}", "holds": value >= bar}
