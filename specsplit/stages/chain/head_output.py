"""Answers of the last stage: picks or log-probabilities made from its logits, so that logits never travel.

The same arithmetic as a target's in one process; it knows no slots and no links.
Legend: R wanted rows (the last committed token, then the tree's nodes), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsplit.core.errors import InvalidPacket
from specsplit.core.types import TokenLogProb
from specsplit.sampling.log_probs import token_log_probs
from specsplit.sampling.pick import NOT_A_NUMBER
from specsplit.sampling.processors import bias_row
from specsplit.sampling.row_search import RowSearch, search_of
from specsplit.sampling.sampler import Sampler
from specsplit.sampling.verify import walk
from specsplit.stages.packet import HeadRequest, Packet, PacketSession


def picks_of(
    sampler: Sampler, logits: Tensor, ids: Sequence[int], session: PacketSession
) -> tuple[tuple[int, ...], tuple[TokenLogProb, ...]]:
    """Return the pick of each row of `logits` [R, V] that a walk may read, and what was asked for of those it emits.

    `ids` are those of the slot's rows, the session's own at the end; none is read unless the sampler counts tokens.

    Raises:
        InvalidPacket: a node of the tree hangs above the tree's root.
    """
    num_rows, num_wanted = session.num_tokens, session.num_logits
    if num_wanted == 0:
        return (), ()
    # [replayed or committed tail | root | tree nodes]: the wanted rows are the root and the nodes behind it.
    root = num_rows - num_wanted
    parents = session.parents or range(-1, num_rows - 1)
    tree = [parent - root - 1 for parent in parents[root + 1 :]]
    if min(tree, default=-1) < -1:
        raise InvalidPacket("A node of a packet's tree hangs above the tree's root.")
    nodes, length = session.token_ids[root + 1 :], session.start + root + 1
    # Where the committed tokens are only counted, a copy of a long context takes longer than the picks.
    committed = ids[:length] if sampler.needs_paths else range(length)
    picks = sampler.picks_of_tree(logits, committed, tree, nodes)
    if sampler.params.top_logprobs is None or NOT_A_NUMBER in picks:
        return tuple(picks), ()
    return tuple(picks), sampler.log_probs(logits, *walk(tree, nodes, picks))


def search_for(request: HeadRequest | None, device: torch.device) -> RowSearch | None:
    """Return what a GPU looks for in a session's rows as it computes them, as an engine asks it for its own sessions'.

    None on a CPU, and where no picks are wanted.
    """
    if device.type == "cpu" or request is None or request.scored:
        return None
    return search_of(request.params.sampling, request.params.seed, request.params.choice)


def log_probs_of(request: HeadRequest, logits: Tensor) -> tuple[TokenLogProb, ...]:
    """Return log_softmax(logits + bias) of the asked tokens, one for each of the last rows of `logits` [R, V]."""
    logits = logits[len(logits) - len(request.scored) :]
    bias = bias_row(request.params.sampling, logits.shape[-1], logits.device)
    return token_log_probs(logits, request.scored, bias, request.params.top_logprobs or 0)


def empty_answer(session: PacketSession) -> PacketSession:
    """Return an answer's session without picks: what it answers, and how many rows were wanted."""
    return PacketSession(session.slot, session.epoch, session.start, num_logits=session.num_logits)


def wanted_rows(packet: Packet) -> Tensor:
    """Return the indices of the wanted rows among all: the last of each session."""
    indices: list[int] = []
    end = 0
    for session in packet.sessions:
        end += session.num_tokens
        indices.extend(range(end - session.num_logits, end))
    return torch.tensor(indices, dtype=torch.long)
