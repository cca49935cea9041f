"""Small Python sources, as a corpus is made of them."""

from __future__ import annotations

from benchmarks.research.train_pair import corpus
from benchmarks.research.train_pair.sources import Source


def module(number: int, lines: int = 12) -> str:
    """Return a small valid Python file that shares no three lines with those of other numbers."""
    body = "".join(
        f"    value_{number}_{line} = combine(first, 'part {number} of {line}')\n"
        f"    first = value_{number}_{line}.strip()\n"
        for line in range(lines)
    )
    return f'"""Module {number}."""\n\n\ndef work_{number}(first):\n{body}    return first\n'


def source(path: str, text: str | bytes) -> Source:
    return Source("demo", path, text if isinstance(text, bytes) else text.encode())


def built(*given: Source, prompts: tuple[str, ...] = ()) -> corpus.Built:
    return corpus.build(given, prompts)
