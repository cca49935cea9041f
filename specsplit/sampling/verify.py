"""The walk: which drafted nodes the target's own picks accept, and the bonus token after them.

Plain lists, no tensors, no probabilities. On a token's route it stands between `pick` and the slot's rollback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_ROOT_INDEX = -1
_UNREAD = 0


def walk(parents: Sequence[int], token_ids: Sequence[int], picks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the accepted node indices, root side first, and the emitted tokens: theirs, then the bonus token.

    `parents` are indices, -1 for the root, and precede their children; `picks[0]` is the target's pick at the
    root and `picks[1 + i]` its pick at node i. A child is accepted if and only if its token is the pick at its
    parent; of duplicate siblings the first one is. Source: Daliri, Musco, Suresh (arXiv 2408.07978).
    """
    accepted, bonus = _follow(parents, token_ids, picks.__getitem__)
    return accepted, [token_ids[node] for node in accepted] + [bonus]


def picks_for_walk(parents: Sequence[int], token_ids: Sequence[int], pick_at: Callable[[int], int]) -> list[int]:
    """Return the picks with which `walk` comes to the same end, 0 where it reads none.

    `pick_at(0)` is the pick at the root and `pick_at(1 + i)` that at node i: only those on the accepted path are asked.
    """
    picks = [_UNREAD] * (1 + len(parents))

    def noted(row: int) -> int:
        picks[row] = pick_at(row)
        return picks[row]

    _follow(parents, token_ids, noted)
    return picks


def _follow(parents: Sequence[int], token_ids: Sequence[int], pick_at: Callable[[int], int]) -> tuple[list[int], int]:
    """Return the accepted nodes and the pick at the last of them; only picks on the way there are asked for."""
    accepted: list[int] = []
    at, wanted = _ROOT_INDEX, pick_at(0)
    for node, (parent, token) in enumerate(zip(parents, token_ids, strict=True)):
        # Children stand behind their parent, so one forward pass meets the whole path.
        if parent == at and token == wanted:
            accepted.append(node)
            at, wanted = node, pick_at(1 + node)
    return accepted, wanted
