"""The sittings in which a pair was trained, one after the other: what each did, as the pair carries it along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "training.json"
"""Name of the file beside the two models that holds all their sittings."""
Sittings = dict[str, list[dict[str, Any]]]
"""The sittings of "target" and of "draft", the first one first."""


def read(pair: Path) -> Sittings:
    """Return the sittings of a pair that was exported; none if it says nothing of them."""
    path = pair / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"target": [], "draft": []}


def of(record: dict[str, Any]) -> Sittings:
    """Return the sittings that a workspace's record tells of: those before it, and its own."""
    earlier: Sittings = record.get("earlier", {})
    return {
        name: [*earlier.get(name, []), *([] if record[name].get("is_kept") else [_own(record, name)])]
        for name in ("target", "draft")
    }


def _own(record: dict[str, Any], name: str) -> dict[str, Any]:
    facts, state = record[name], record[f"{name}_state"]
    origin = facts["provenance"]
    sitting = {part: facts[part] for part in ("parameters", "shape", "device", "dtype", "threads", "seed")}
    sitting |= {"tokens": state["tokens"], "steps": state["step"], "minutes": round(state["elapsed_s"] / 60, 1)}
    sitting |= {"commit": origin["commit"][:12], "machine": origin["machine"], "versions": origin["versions"]}
    sitting |= {"share": facts["share"]} if "share" in facts else {}
    measured = record.get("evaluation", {})
    sitting |= {"nats_per_byte": measured.get(name), "corpus": measured.get("corpus")}
    return sitting | ({"texts": record["continuations"]["rows"]} if name == "draft" else {})
