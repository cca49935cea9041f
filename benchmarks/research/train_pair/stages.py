"""The stages of the recipe, each from files to files in a workspace. Decides no setting."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from benchmarks import workloads
from benchmarks.environment import provenance
from benchmarks.research.train_pair import corpus, model, sittings, tokenizer
from benchmarks.research.train_pair.continuations import Continuations
from benchmarks.research.train_pair.data import Stream, pack
from benchmarks.research.train_pair.distill import CONTINUED_TV_WEIGHT, DraftTask
from benchmarks.research.train_pair.files import write_whole
from benchmarks.research.train_pair.filters import without_header
from benchmarks.research.train_pair.forward import Forward
from benchmarks.research.train_pair.loop import Budget, Loop
from benchmarks.research.train_pair.losses import Losses
from benchmarks.research.train_pair.optimizer import Optimizers
from benchmarks.research.train_pair.recipe import Machine, Recipe
from benchmarks.research.train_pair.sources import Package
from benchmarks.research.train_pair.teacher import Teacher
from benchmarks.research.train_pair.train import TargetTask
from benchmarks.research.train_pair.workspace import Workspace

NUM_PROMPTS = 50
"""All of benchmarks/data/code_prompts.jsonl is kept out of training."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the recipe: where its files are, with what settings, on what machine."""

    space: Workspace
    recipe: Recipe
    machine: Machine
    console: Console

    def tell(self, line: str) -> None:
        self.console.print(line)


def build_corpus(
    run: Run, packages: Sequence[Package], pip_arguments: Sequence[str], max_bytes: int | None
) -> dict[str, object]:
    """Gather, filter, split and write the corpus, unless it is there; return its manifest."""
    prompts = [prompt.text for prompt in workloads.read_prompts(workloads.CODE_PROMPTS, NUM_PROMPTS)]
    sources = corpus.gather(packages, run.space.wheels, pip_arguments, run.tell)
    built = corpus.build(sources, prompts, max_bytes)
    run.tell(f"compressing {len(built.documents)} files")
    record = corpus.write(run.space.corpus, built, packages)
    run.tell(f"corpus: {record['train_bytes']} bytes to train on, {record['held_out_bytes']} held out")
    return record


def take_corpus(run: Run, path: Path) -> None:
    """Copy a corpus that was built elsewhere, with its manifest."""
    run.space.root.mkdir(parents=True, exist_ok=True)
    for origin, copy in (
        (path, run.space.corpus),
        (corpus.manifest_path(path), corpus.manifest_path(run.space.corpus)),
    ):
        if not copy.exists():
            run.space.require(origin, "corpus")
            shutil.copyfile(origin, copy)


def build_tokenizer(run: Run) -> None:
    """Train the tokenizer and write both splits as token streams, unless they are there."""
    space = run.space
    if space.train_tokens.exists() and space.held_out_tokens.exists():
        return
    documents = corpus.read(space.require(space.corpus, "corpus"))
    train = [document.text for document in documents if not document.held_out]
    held_out = [document.text for document in documents if document.held_out]
    if not space.tokenizer.exists():
        run.tell("training the tokenizer")
        tokenizer.save(tokenizer.train(train, run.recipe.vocab_size), space.tokenizer)
    trained = tokenizer.load(space.tokenizer)
    run.tell("encoding")
    bare = [without_header(text) for text in held_out]
    num_held_out = pack(tokenizer.encode_documents(trained, held_out), space.held_out_tokens)
    pack(tokenizer.encode_documents(trained, bare), space.held_out_code_tokens)
    num_train = pack(tokenizer.encode_documents(trained, train), space.train_tokens)
    held_out_bytes = sum(len(text.encode()) for text in held_out)
    space.note(
        vocab_size=trained.get_vocab_size(),
        train_tokens=num_train,
        held_out_tokens=num_held_out,
        bytes_per_token=round(held_out_bytes / num_held_out, 3),
    )


def _is_done(run: Run, stage: str) -> bool:
    return bool(run.space.record().get(stage, {}).get("is_done"))


def train_target(run: Run, minutes: float) -> None:
    """Train the target, from its checkpoint if there is one, and save it.

    Raises:
        Interrupted: it was stopped; the same call goes on from there.
    """
    if _is_done(run, "target"):
        return
    space, recipe, machine = run.space, run.recipe, run.machine
    stream = Stream.open(space.require(space.train_tokens, "tokenizer"))
    is_new = not space.started_target.exists()
    trained = (
        model.new_model(recipe.target, recipe.vocab_size, recipe.seed) if is_new else model.load(space.started_target)
    ).to(machine.device)
    forward = Forward(trained, machine.dtype, machine.compiled)
    losses = Losses.new(machine.compiled)
    task = TargetTask(trained, forward, losses, stream, recipe.target_batches, recipe.seed)
    rates = recipe.target_rates if is_new else recipe.continued_rates
    _run_loop(run, "target", task, Optimizers(trained, rates, machine.dtype), minutes)
    save(run, trained, space.target)
    space.note(target=_facts(run, "target", trained, minutes))


def write_continuations(run: Run, minutes: float) -> None:
    """Let the target write the text that the draft learns from beside human text."""
    space, machine = run.space, run.machine
    if _is_done(run, "continuations"):
        return
    target = model.load(space.require(space.target, "target"), machine.dtype).to(machine.device).eval()
    stream = Stream.open(space.train_tokens)
    made = Continuations(space.continuations, run.recipe.continuation_batch, run.recipe.seed)
    num_rows = made.extend(target, stream, minutes, run.tell)
    space.note(continuations={"rows": num_rows, "minutes": minutes, "is_done": True})


def distill_draft(run: Run, minutes: float) -> None:
    """Distil the draft, from its checkpoint if there is one, and save it.

    Raises:
        Interrupted: it was stopped; the same call goes on from there.
    """
    if _is_done(run, "draft"):
        return
    space, recipe, machine = run.space, run.recipe, run.machine
    target = model.load(space.require(space.target, "target")).to(machine.device).requires_grad_(False)
    is_new = not space.started_draft.exists()
    draft = (model.new_draft(recipe.draft, target, recipe.seed) if is_new else model.load(space.started_draft)).to(
        machine.device
    )
    reader = Forward(target, machine.dtype, machine.compiled)
    human, own = Stream.open(space.train_tokens), Stream.open(space.require(space.continuations, "distill"))
    task = DraftTask(
        model=draft,
        forward=Forward(draft, machine.dtype, machine.compiled),
        losses=Losses.new(machine.compiled),
        human=Teacher(human, reader, recipe.seed + 1, recipe.num_kept_blocks),
        own=Teacher(own, reader, recipe.seed + 1, recipe.num_kept_blocks),
        batches=recipe.draft_batches,
        first_tv_weight=0.0 if is_new else CONTINUED_TV_WEIGHT,
    )
    rates = recipe.draft_rates if is_new else recipe.continued_rates
    _run_loop(run, "draft", task, Optimizers(draft, rates, machine.dtype), minutes)
    save(run, draft, space.draft)
    space.note(draft=_facts(run, "draft", draft, minutes))


def _run_loop(run: Run, name: str, task: TargetTask | DraftTask, optimizers: Optimizers, minutes: float) -> None:
    loop = Loop(name, task, optimizers, Budget(minutes), run.space.root, run.console)
    state = loop.run()
    run.space.note(**{f"{name}_state": asdict(state)})


def save(run: Run, trained: LlamaForCausalLM, folder: Path) -> None:
    """Write a model as an ordinary checkpoint, its tokenizer beside it."""
    model.save(trained, folder)
    tokenizer.save_for_transformers(tokenizer.load(run.space.tokenizer), folder, model.CONTEXT)


def _facts(run: Run, name: str, trained: LlamaForCausalLM, minutes: float) -> dict[str, object]:
    machine = run.machine
    return {
        "is_done": True,
        "minutes": round(minutes, 2),
        "parameters": model.num_parameters(trained),
        "shape": asdict(model.Shape.of(trained.config)),
        "seed": run.recipe.seed,
        "device": torch.cuda.get_device_name() if machine.device.type == "cuda" else "cpu",
        "dtype": str(machine.dtype).removeprefix("torch."),
        "threads": machine.threads,
        "is_compiled": machine.compiled,
        "provenance": provenance(),
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """Minutes of each stage, settled once and kept in the workspace, so that a resumed run keeps to it."""

    target: float
    continuations: float
    distill: float


def plan(run: Run, minutes: float, spent_s: float) -> Plan:
    """Split what is left of `minutes` after `spent_s`, or return the plan that the workspace has."""
    settled = run.space.record().get("plan")
    if settled is None:
        left, shares = max(0.05, minutes - spent_s / 60), run.recipe.shares
        settled = {
            "target": left * shares.target,
            "continuations": left * shares.continuations,
            "distill": left * shares.distill,
        }
        run.space.note(plan=settled, minutes=minutes, started=time.strftime("%Y-%m-%d %H:%M"))
    return Plan(**settled)


def export(space: Workspace, folder: Path, tell: Callable[[str], None]) -> None:
    """Copy the pair and its card to where the package keeps it.

    Raises:
        InvalidSettings: the pair is not complete.
    """
    for name in ("target", "draft"):
        space.require(space.pair / name / "model.safetensors", "all")
    space.require(space.pair / "README.md", "evaluate")
    for path in sorted(space.pair.rglob("*")):
        if path.is_file():
            write_whole(folder / path.relative_to(space.pair), path.read_bytes())
            tell(str(path.relative_to(space.pair)))
    write_whole(folder / sittings.FILE, json.dumps(sittings.of(space.record()), indent=1).encode())
    tell(sittings.FILE)
