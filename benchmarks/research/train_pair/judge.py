"""The evaluation stage: measures the pair, holds it against the bars, writes evaluation.json and the model card."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import workloads
from benchmarks.research.train_pair import acceptance, corpus, model, sittings, tokenizer
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
MAX_FILE_BYTES = 45_000_000
"""Of each model's weights."""
MAX_LOOPS = 0.3
"""Share of the greedy answers that end in a loop."""


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
    found["weight_bytes"] = max(path.stat().st_size for path in space.pair.rglob("*.safetensors"))
    manifest = json.loads(corpus.manifest_path(space.corpus).read_text(encoding="utf-8"))
    measured = {name: round(losses[name]["nats_per_byte"], 4) for name in ("target", "draft")}
    space.note(evaluation={**measured, "corpus": manifest["sha256"]})
    found["bars"] = bars(found, space.record())
    write_whole(space.evaluation, json.dumps(found, indent=1).encode())
    write_card(space, found)
    for bar in found["bars"]:
        run.tell(f"{'holds' if bar['holds'] else 'FAILS'}  {bar['name']}: {bar['value']} (bar {bar['bar']})")
    return found


def bars(found: dict[str, Any], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each bar with its value; which bars apply depends on the device that trained the target.

    A target that goes on from another one is no worse than that was on the same text.
    """
    last = sittings.of(record)["target"][-1]
    wanted = BARS["cpu" if last["device"] == "cpu" else "cuda"]
    target, draft = (found["loss"][name]["nats_per_byte"] for name in ("target", "draft"))
    greedy, coupled = (found[f"code_prompts_T{name}"]["mean_acceptance_length"] for name in ("0", "1"))
    samples, answers = found["samples"], found["code_prompts_T0"]
    readable = sum(sample["brackets_match"] and sample["indentation_is_coherent"] for sample in samples)
    return [
        _at_most("target, nats per byte", target, min([wanted["loss"], *_losses_before(record)])),
        _at_least("draft worse by, nats per byte", draft - target, MIN_GAP),
        _at_least("chain of 4, greedy: mean acceptance length", greedy, wanted["greedy"]),
        _at_least("chain of 4, T=1: mean acceptance length", coupled, wanted["coupled"]),
        _at_least("answers with coherent brackets and indentation", readable, len(samples)),
        _at_most("greedy answers that loop, share", answers["num_loops"] / answers["num_prompts"], MAX_LOOPS),
        _at_most("larger weights file, bytes", found["weight_bytes"], MAX_FILE_BYTES),
        _at_most("loading both, seconds", found["loading_s"], MAX_LOADING_S),
    ]


def _losses_before(record: dict[str, Any]) -> list[float]:
    """Return what earlier sittings reached on the text that this one is measured on."""
    *before, last = sittings.of(record)["target"]
    return [one["nats_per_byte"] for one in before if one.get("corpus") == last["corpus"] is not None]


def _at_most(name: str, value: float, bar: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "bar": f"<= {bar}", "holds": value <= bar}


def _at_least(name: str, value: float, bar: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "bar": f">= {bar}", "holds": value >= bar}
