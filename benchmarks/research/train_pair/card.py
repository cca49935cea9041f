"""The model card: one page of Markdown from the records of a run. Measures nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.research.train_pair import sittings
from benchmarks.research.train_pair.acceptance import DEPTHS
from benchmarks.research.train_pair.corpus import manifest_path
from benchmarks.research.train_pair.files import write_whole
from benchmarks.research.train_pair.workspace import Workspace

_FRONT = """---
license: apache-2.0
language: code
tags: [speculative-decoding, python]
---

# The embedded pair

Two small models that SpecSplit ships, so that everything can be tried and measured without a download: a target that
continues Python source, and a small draft distilled from it. Ordinary transformers checkpoints in bf16:
`AutoModelForCausalLM.from_pretrained(folder)` opens them. Made by `python -m benchmarks.research train-pair all`; the
choices are explained in docs/training.md.
"""
_NOT_FOR = """## What it is not for

It completes Python that looks right; it does not know what the code should do. It has no knowledge of the world,
follows no instructions, knows no other language, and may repeat lines of its training text or itself. Do not use what
it writes unread, and do not judge speculative decoding's worth for large models by its acceptance alone: use it to run,
show and measure the machinery.
"""


def write_card(space: Workspace, found: dict[str, Any]) -> None:
    """Write README.md beside the weights."""
    record = space.record()
    manifest = json.loads(manifest_path(space.corpus).read_text(encoding="utf-8"))
    parts = (
        _FRONT,
        _data(manifest, record),
        recipe_section(record),
        _losses(found),
        _acceptance(found),
        _bars(found),
        _samples(found["samples"]),
        _NOT_FOR,
    )
    write_whole(space.pair / "README.md", "\n".join(parts).encode())


def _data(manifest: dict[str, Any], record: dict[str, Any]) -> str:
    packages = manifest["packages"]
    licences = Counter(package["licence"] for package in packages)
    listed = ", ".join(f"{package['name']} {package['version']} ({package['licence']})" for package in packages)
    counted = ", ".join(f"{licence} {count}" for licence, count in licences.most_common())
    return f"""## Data

Python source of the standard library and of {len(packages) - 1} packages, read from their wheels:

| | files | bytes |
|---|---|---|
| trained on | {manifest["train_files"]:,} | {manifest["train_bytes"]:,} |
| held out | {manifest["held_out_files"]:,} | {manifest["held_out_bytes"]:,} |

A file is held out where the SHA-256 of its text is 0 or 1 modulo 100. Tests, generated files, data tables, vendored
copies and near-duplicates are out, and so are files near a held-out one. Three in four files trained on lose the
comments that they begin with, mostly a licence; held-out files keep them. All the same
{manifest["held_out_windows_in_train"]:.1%} of the held-out windows of three lines stand somewhere in the training text,
as common idioms do. The prompts of `benchmarks/data/code_prompts.jsonl` were written by hand and are not in it.
Corpus file: {manifest["compressed_bytes"]:,} bytes, SHA-256 `{manifest["sha256"]}`.

Tokenizer: byte-level BPE, {record["vocab_size"]:,} tokens, {record["bytes_per_token"]} bytes of held-out text each.

Licences: {counted}.

<details><summary>Packages</summary>

{listed}

</details>
"""


def recipe_section(record: dict[str, Any]) -> str:
    lines = ["## Recipe", "", "| | target | draft |", "|---|---|---|"]
    done = sittings.of(record)
    both = [done[name] for name in ("target", "draft")]
    rows: dict[str, Iterable[Any]] = {
        "parameters": (f"{all_of[-1]['parameters']:,}" for all_of in both),
        "layers x width (MLP), heads/KV heads": (_each(all_of, lambda one: _shape(one["shape"])) for all_of in both),
        "tokens seen": (_each(all_of, lambda one: f"{one['tokens']:,}") for all_of in both),
        "steps": (_each(all_of, lambda one: f"{one['steps']:,}") for all_of in both),
        "minutes": (_each(all_of, lambda one: f"{one['minutes']:.1f}") for all_of in both),
        "device, dtype, threads": (
            _each(all_of, lambda one: f"{one['device']}, {one['dtype']}, {one['threads']}") for all_of in both
        ),
        "seed": (_each(all_of, lambda one: str(one["seed"])) for all_of in both),
        "share of its end in the weights": (_each(all_of, lambda one: f"{one.get('share', 1):g}") for all_of in both),
        "commit": (_each(all_of, lambda one: one["commit"]) for all_of in both),
    }
    lines += [f"| {name} | " + " | ".join(map(str, values)) + " |" for name, values in rows.items()]
    last = done["draft"][-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    lines += ["", f"Machine: {last['machine']['cpu']}, {last['machine']['cores']} cores. Versions: {versions}."]
    num_texts = _each(done["draft"], lambda one: f"{one['texts']:,}")
    lines += [
        "",
        f"Half of what the draft saw was human text, half {num_texts} texts by the target, gone over several times.",
    ]
    return "\n".join(lines) + "\n"


def _each(sittings_of_one: Sequence[dict[str, Any]], told: Callable[[dict[str, Any]], str]) -> str:
    """Return what the sittings of one model say, once if all say the same."""
    values = [told(sitting) for sitting in sittings_of_one]
    return values[0] if len(set(values)) == 1 else ", then ".join(values)


def _shape(shape: dict[str, int]) -> str:
    return f"{shape['num_layers']} x {shape['hidden']} ({shape['mlp']}), {shape['num_heads']}/{shape['num_kv_heads']}"


def _losses(found: dict[str, Any]) -> str:
    target, draft, bare = (found["loss"][name] for name in ("target", "draft", "target_without_headers"))
    lines = [
        "## Held-out loss",
        "",
        "| | nats per byte | nats per token | "
        + " | ".join(f"at {positions}" for positions in target["nats_per_byte_by_position"])
        + " |",
    ]
    lines.append("|---" * (3 + len(target["nats_per_byte_by_position"])) + "|")
    for name, part in (("target", target), ("draft", draft), ("target, headers cut off", bare)):
        by_position = " | ".join(f"{value:.3f}" for value in part["nats_per_byte_by_position"].values())
        lines.append(f"| {name} | {part['nats_per_byte']:.4f} | {part['nats_per_token']:.4f} | {by_position} |")
    agreement = found["agreement_on_human_text"]
    summary = (
        f"Over {target['num_bytes']:,} bytes in windows of 2,048 tokens. Teacher-forced on that text the two agree on "
        f"the next token in {agreement['greedy']:.1%} of places greedily and {agreement['coupled']:.1%} at T=1 with "
        f"shared noise (1 - TV: {agreement['one_minus_tv']:.1%})."
    )
    return "\n".join([*lines, "", summary]) + "\n"


def _acceptance(found: dict[str, Any]) -> str:
    lines = [
        "## Acceptance",
        "",
        "Mean acceptance length (bonus token included), chain of 4, 96 new tokens a prompt, in fp32:",
        "",
        "| prompts | T | all | outside loops | answers that loop |",
        "|---|---|---|---|---|",
    ]
    for name in ("code_prompts", "held_out_files"):
        for temperature in ("0", "1"):
            part = found[f"{name}_T{temperature}"]
            outside = part.get("mean_acceptance_length_outside_loops")
            lines.append(
                f"| {name} | {temperature} | {part['mean_acceptance_length']:.3f} | "
                f"{'' if outside is None else format(outside, '.3f')} | {part['num_loops']} of {part['num_prompts']} |"
            )
    lines += ["", "By depth, depth x branching nodes verified per round:", ""]
    lines += ["| T | branching | " + " | ".join(map(str, DEPTHS)) + " |", "|---" * (2 + len(DEPTHS)) + "|"]
    for row in found["table"]:
        lengths = " | ".join(f"{value:.2f}" for value in row["by_depth"])
        lines.append(f"| {row['temperature']} | {row['branching']} | {lengths} |")
    return "\n".join(lines) + "\n"


def _bars(found: dict[str, Any]) -> str:
    lines = ["## Bars", "", "| | measured | bar | holds |", "|---|---|---|---|"]
    lines += [
        f"| {bar['name']} | {bar['value']} | {bar['bar']} | {'yes' if bar['holds'] else 'no'} |"
        for bar in found["bars"]
    ]
    return "\n".join(lines) + "\n"


def _samples(samples: list[dict[str, Any]]) -> str:
    lines = [
        "## Samples",
        "",
        "The first ten prompts, greedy, 96 tokens, unedited; the answer begins after the mark `▶`.",
        "",
    ]
    for sample in samples:
        lines += ["````python", sample["prompt"] + "▶" + sample["answer"], "````", ""]
    return "\n".join(lines)
