"""Near-duplicates by shingles: windows of three lines, hashed, of which a fixed quarter is kept as a file's sketch.

Source: Manber, Finding similar files in a large file system (1994). Knows no package and no split.
"""

from __future__ import annotations

import hashlib

WINDOW_LINES = 3
SAMPLED_ONE_IN = 4
MAX_SEEN = 0.5
MAX_SEEN_HELD_OUT = 0.25
MAX_OF_PROMPT = 0.5


def shingles(text: str) -> set[int]:
    """Return a hash for each window of three lines that are not blank, whatever their indentation."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    windows = ("\n".join(lines[i : i + WINDOW_LINES]) for i in range(max(1, len(lines) - WINDOW_LINES + 1)))
    return {int.from_bytes(hashlib.blake2b(window.encode(), digest_size=8).digest(), "big") for window in windows}


def sketch(text: str) -> set[int]:
    """Return the sampled shingles: the same windows are sampled from every file."""
    return {shingle for shingle in shingles(text) if shingle % SAMPLED_ONE_IN == 0}


class Duplicates:
    """Remembers the files let in; held-out files have to be offered first.

    Ownership: the caller decides the order, and so which of two near-duplicates stays.
    """

    def __init__(self, prompts: list[str]) -> None:
        self._digests: set[str] = set()
        self._train: set[int] = set()
        self._held_out: set[int] = set()
        self._prompts = [shingles(prompt) for prompt in prompts]

    def reason_to_reject(self, digest: str, text: str, held_out: bool) -> str | None:
        """Let a file in and return None, or return why it is not let in."""
        if digest in self._digests:
            return "duplicate"
        every = shingles(text)
        if any(len(prompt & every) > MAX_OF_PROMPT * len(prompt) for prompt in self._prompts):
            return "holds a benchmark prompt"
        sampled = {shingle for shingle in every if shingle % SAMPLED_ONE_IN == 0}
        if not held_out and len(sampled & self._held_out) > MAX_SEEN_HELD_OUT * len(sampled):
            return "near a held-out file"
        seen = self._held_out if held_out else self._train
        if len(sampled & seen) > MAX_SEEN * len(sampled):
            return "near-duplicate"
        self._digests.add(digest)
        seen |= sampled
        return None

    @property
    def held_out_share_in_train(self) -> float:
        """The share of the held-out files' sampled windows that also stand somewhere in the training files."""
        return len(self._held_out & self._train) / max(1, len(self._held_out))
