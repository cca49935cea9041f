"""The lookup drafter: a token tree of the continuations of earlier occurrences of the last tokens.

A session's text is followed by `TextLookup`; a long one is read piece by piece, so that no other session stands still.

Knows neither model nor worker. Source: prompt lookup decoding (Saxena 2023), with an incremental n-gram index.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field

from specsplit.core.record import record
from specsplit.speculation.acceptance import lookup_cells
from specsplit.speculation.token_tree import TokenTree

NO_POSITION = -1
_SPACING = 3
"""From one n-gram length to the next; closer ones find rare long matches among many short ones, at a cost per token."""

MAX_TOKENS = 1 << 14
"""Tokens at the end of a session's first text that are read; the index takes some 300 bytes for each."""
_PIECE_TOKENS = 256
"""Tokens that are read without a pause: about a millisecond."""
_ROUND_PIECES = 4
"""Pieces that are read in each round: with a large model in this process a round is one turn of the event loop."""


@record
class LookupTree:
    """A tree of lookup's nodes, without estimates."""

    nodes: TokenTree = field(default_factory=TokenTree)
    cells: Sequence[int] = ()
    """The nodes' cells in the calibration table, by match length, depth and rank.

    The match length is how many tokens before the root's children agree with the occurrence that gave the node. Rank 0
    is the first of its siblings: the one with the longest match, of equals the most recent.
    """

    def __len__(self) -> int:
        return len(self.cells)

    def path_log_probs(self, log_probs: Sequence[float]) -> list[float]:
        """Return the log-probability of each node's whole path; `log_probs` are those of the cells."""
        paths: list[float] = []
        for parent, cell in zip(self.nodes.parents, self.cells, strict=True):
            paths.append((paths[parent] if parent >= 0 else 0.0) + log_probs[cell])
        return paths

    def num_spelled(self, token_ids: Sequence[int], chosen: Collection[int] | None = None) -> int:
        """Return how many of `token_ids` these nodes spell from the root, by default all of them."""
        path = self.nodes.walk(token_ids)
        if chosen is None:
            return len(path)
        return next((depth for depth, node in enumerate(path) if node not in chosen), len(path))


class LookupIndex:
    """The places at which each n-gram of one session's committed tokens ended, for a few lengths n; it only grows.

    An occurrence is a place where the last tokens have been before; its match length, at most `max_length`, is the
    number of tokens that agree. Those of at least `min_length` count. Work is bounded on any text: of each length n
    the `max_probes` most recent places are looked at, and the `max_matches` best occurrences are followed.
    """

    def __init__(
        self,
        token_ids: Iterable[int] = (),
        *,
        min_length: int = 1,
        max_length: int = 16,
        max_matches: int = 6,
        max_probes: int = 24,
        eos_ids: Iterable[int] = (),
    ) -> None:
        assert 1 <= min_length <= max_length, "a match has at least one token"
        self._min_length, self._max_length = min_length, max_length
        self._max_matches, self._max_probes = max_matches, max_probes
        self._eos_ids = frozenset(eos_ids)
        self._token_ids: list[int] = []
        self._grams = [_Grams(min_length)]
        while self._grams[-1].length * _SPACING < max_length:
            self._grams.append(_Grams(self._grams[-1].length * _SPACING))
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append newly committed tokens."""
        start = len(self._token_ids)
        self._token_ids.extend(token_ids)
        # One object for a place, whatever the length: a fifth of the memory.
        places = list(range(start, len(self._token_ids)))
        for grams in self._grams:
            grams.extend(self._token_ids, places)

    @property
    def longest_hit(self) -> int:
        """How many of the kept lengths, the shortest first, have an n-gram that occurred before; 0 if none does.

        It costs nothing, and says before any search how good the best occurrence is.
        """
        for count in range(len(self._grams), 0, -1):
            previous = self._grams[count - 1].previous
            if previous and previous[-1] != NO_POSITION:
                return count
        return 0

    def candidates(self, max_nodes: int, max_depth: int, max_branching: int) -> LookupTree:
        """Return a tree of likely continuations of the committed tokens.

        Occurrences are followed from the longest match to the shortest, of equals from the most recent; nothing grows
        below an end-of-sequence token. An occurrence that runs into the end goes on with its own beginning, as a text
        of that period would.
        """
        if min(max_nodes, max_depth, max_branching) < 1:
            return LookupTree()
        paths = [(self._continuation(end, max_depth), length) for length, end in self._occurrences()]
        return _merge(paths, max_nodes, max_branching, self._eos_ids)

    def _occurrences(self) -> list[tuple[int, int]]:
        """Return the best occurrences as (match length, position of the last matching token), best first."""
        wanted, suffix = self._max_matches, self._token_ids[-self._max_length :]
        found: list[tuple[int, int]] = []
        # From the longest n-grams to the shortest: a match of n-gram length s is shorter than the lengths before it,
        # [ s | below ), so no occurrence is found twice.
        backwards, below = suffix[::-1], self._max_length + 1
        for grams in reversed(self._grams):
            size = grams.length
            if size > len(suffix):
                continue
            self._follow(grams, grams.previous[-1], backwards, below, found)
            if sum(length >= size for length, _ in found) >= wanted:
                break  # shorter n-grams have only shorter matches to add
            below = size
        found.sort(reverse=True)
        return found[:wanted]

    def _follow(self, grams: _Grams, end: int, backwards: list[int], below: int, found: list[tuple[int, int]]) -> None:
        """Add the occurrences of one n-gram from `end` back whose match is shorter than `below`."""
        token_ids, previous, size, longest = self._token_ids, grams.previous, grams.length, self._max_length
        missing = self._max_matches
        for _ in range(self._max_probes):
            if end == NO_POSITION:
                return
            length, limit = size, min(len(backwards), end + 1)
            while length < limit and token_ids[end - length] == backwards[length]:
                length += 1
            if length < below:
                found.append((length, end))
                missing -= length == longest
                if not missing:
                    return
            end = previous[end]

    def _continuation(self, end: int, depth: int) -> list[int]:
        """Return the `depth` tokens behind the occurrence that ends at `end`."""
        start = end + 1
        token_ids = self._token_ids[start : start + depth]
        if len(token_ids) < depth:
            token_ids = (token_ids * (depth // len(token_ids) + 1))[:depth]
        return token_ids


class _Grams:
    """The places of all n-grams of one length, the most recent first: a linked list per n-gram.

    An n-gram's key is its hash of 64 bits: a collision would only make a bad guess.
    """

    __slots__ = ("_latest", "length", "previous")

    def __init__(self, length: int) -> None:
        self.length = length
        self._latest: dict[int, int] = {}
        self.previous: list[int] = []
        """Per position, the place at which the n-gram that ends there ended before; NO_POSITION if nowhere."""

    def extend(self, token_ids: list[int], places: Iterable[int]) -> None:
        """Take in the n-grams that end at `places`, which go on behind the last ones."""
        length, latest, previous = self.length, self._latest, self.previous
        for place in places:
            # At the text's start the key is one of fewer tokens, which nobody asks for.
            key = hash(tuple(token_ids[max(place + 1 - length, 0) : place + 1]))
            previous.append(latest.get(key, NO_POSITION))
            latest[key] = place


def _merge(
    paths: Iterable[tuple[list[int], int]], max_nodes: int, max_branching: int, eos_ids: frozenset[int]
) -> LookupTree:
    """Make a tree of paths from the root, each with its match length: the same token under one parent is one node.

    A path ends where the limits or the first end-of-sequence token end it.
    """
    nodes = TokenTree()
    token_ids, parents, depths, child_of = nodes.token_ids, nodes.parents, nodes.depths, nodes.child_of
    match_lengths: list[int] = []
    ranks: list[int] = []
    num_children = [0]  # of the root, then of each node
    for path, match_length in paths:
        parent = -1
        for depth, token_id in enumerate(path, 1):
            key = (parent, token_id)
            node = child_of.get(key)
            if node is None:
                node, rank = len(token_ids), num_children[parent + 1]
                if node == max_nodes or rank == max_branching:
                    break
                child_of[key] = node
                num_children[parent + 1] += 1
                num_children.append(0)
                token_ids.append(token_id)
                parents.append(parent)
                depths.append(depth)
                match_lengths.append(match_length)
                ranks.append(rank)
            if token_id in eos_ids:
                break
            parent = node
    return LookupTree(nodes, lookup_cells(match_lengths, depths, ranks))


class TextReader:
    """Reads long texts, one piece in each turn of the event loop, however many there are."""

    def __init__(self) -> None:
        self._unread: deque[TextLookup] = deque()

    def read(self, text: TextLookup) -> None:
        """Read a text, piece by piece, between whatever else the event loop has to do."""
        self._unread.append(text)
        if len(self._unread) == 1:
            asyncio.get_running_loop().call_soon(self._read_piece)

    def _read_piece(self) -> None:
        if self._unread[0].read_piece():
            self._unread.rotate(-1)
        else:
            self._unread.popleft()
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read_piece)


class TextLookup:
    """Lookup in `token_ids`, which grows at its end only; nothing is found before all of it has been read."""

    # [ before the last MAX_TOKENS of the first text | read | not yet read ), all of it read by `follow` or the reader

    def __init__(self, reader: TextReader, token_ids: Sequence[int], eos_ids: Iterable[int] = ()) -> None:
        self._reader, self._token_ids = reader, token_ids
        self._index = LookupIndex(eos_ids=eos_ids)
        self._num_read = max(0, len(token_ids) - MAX_TOKENS)
        self._is_reading = False
        """Whether the reader has it."""

    def follow(self) -> None:
        """Take in what the text has grown by; a session's first call begins to read its prompt.

        That call is to come behind the prompt's round, since a session that is refused or waits has no need of it.
        """
        was_reading = self._is_reading
        for _ in range(_ROUND_PIECES):
            if not self.read_piece():
                return
        if not was_reading:
            self._is_reading = True
            self._reader.read(self)

    def read_piece(self) -> bool:
        """Read a piece of the text; return whether there is more."""
        end = min(self._num_read + _PIECE_TOKENS, len(self._token_ids))
        self._index.extend(self._token_ids[self._num_read : end])
        self._num_read = end
        self._is_reading = self._is_reading and end < len(self._token_ids)
        return end < len(self._token_ids)

    @property
    def longest_hit(self) -> int:
        """How good the best occurrence is (`LookupIndex.longest_hit`); 0 while the text is being read."""
        return 0 if self._is_reading else self._index.longest_hit

    def candidates(self, max_nodes: int, max_depth: int, max_branching: int) -> LookupTree:
        """Return a tree of likely continuations of the text, without nodes while it is being read."""
        return LookupTree() if self._is_reading else self._index.candidates(max_nodes, max_depth, max_branching)

    def close(self) -> None:
        """Read no further."""
        self._token_ids, self._num_read = (), 0
