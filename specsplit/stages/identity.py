"""The identity of a stage, and what a coordinator expects of its chain; every misfit is refused in one sentence.

Knows no model, no tensor and no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from specsplit.core.defaults import EndsAt
from specsplit.core.errors import PeerMismatch
from specsplit.core.exactness import Exactness
from specsplit.core.types import PROTOCOL_VERSION
from specsplit.model.attention.paths import slot_rows


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """The contents of one stage: layers `start` to `end` - 1 of `num_layers`, perhaps ends of the model, and slots."""

    model: str
    num_layers: int
    start: int
    end: int
    has_embedding: bool
    has_head: bool
    hidden_size: int
    vocab_size: int
    dtype: str
    context: int
    """Tokens that one session may hold."""
    node_limit: int
    """Rows of a tree behind them."""
    num_slots: int
    slot_bytes: int
    """Bytes of the largest slot that it can export."""
    config_hash: str
    """Hash of the model's config.json."""
    weights_hash: str
    """Hash of the tensors that the stage has read, in however many files they are."""
    protocol_version: int = PROTOCOL_VERSION
    exactness: Exactness = "near ties"
    """Whether a row has the same bits in any company."""
    numerics: str = ""
    """Fingerprint of the arithmetic; empty if unknown."""
    kv_bytes_per_token: int = 0
    """Bytes of KV cache that one token takes here; 0 if unknown."""
    kv_rows: int = 0
    """Rows of all slots together that may hold memory; 0 if unknown."""
    hidden_dtype: str = ""
    """Number format of its hidden states; empty if it is that of the weights."""
    model_revision: str = ""
    """Commit of the hub that the files are of; empty if they are not from the hub, or unknown."""

    @property
    def computed_dtype(self) -> str:
        """Return the number format of its hidden states."""
        return self.hidden_dtype or self.dtype

    @property
    def layers(self) -> str:
        """Return the layer range as users write it."""
        return f"{self.start}:{self.end}"


@dataclass(frozen=True, slots=True)
class ExpectedChain:
    """The demands of a model's coordinator on its stages."""

    model: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    context: int
    node_limit: int
    num_slots: int
    ends: EndsAt
    config_hash: str
    weights_hash: Callable[[StageIdentity], str] | None = None
    """Hashes the same tensors in the coordinator's own files; None, or empty, if it lacks them and believes stages."""
    hidden_dtype: str | None = ""
    """Number format of hidden states; empty if it is that of the weights, None if any will do that all stages share."""
    model_revision: str = ""
    """Commit of the hub that the coordinator's files are of; empty if they are not from the hub."""

    def check_chain(self, stages: Sequence[tuple[str, StageIdentity]]) -> None:
        """Check that stages, each with its address, make up the model in this order.

        Raises:
            PeerMismatch: one does not fit the model, or together they do not cover its layers.
        """
        expected = self.settled(stages[0][1]) if stages else self
        for address, identity in stages:
            expected.check_stage(address, identity)
        self._check_commits(stages)
        self._check_cover(stages)

    def settled(self, stage: StageIdentity) -> ExpectedChain:
        """Return the demands on the other stages of a chain that has `stage`, whose hidden states they must share."""
        return replace(self, hidden_dtype=stage.computed_dtype) if self.hidden_dtype is None else self

    def check_stage(self, address: str, identity: StageIdentity) -> None:
        """Check one stage by itself, wherever it stands.

        Raises:
            PeerMismatch: it is of another model, or holds less than is needed.
        """
        peer = f"The stage at {address}"
        if identity.protocol_version != PROTOCOL_VERSION:
            raise PeerMismatch(
                f"{peer} speaks protocol version {identity.protocol_version}, not {PROTOCOL_VERSION} as here; install "
                "the same release on both sides."
            )
        shape = (identity.num_layers, identity.hidden_size, identity.vocab_size)
        same = identity.config_hash == self.config_hash and shape == (
            self.num_layers,
            self.hidden_size,
            self.vocab_size,
        )
        if not same:
            raise PeerMismatch(
                f"{peer} has another model ({identity.model}, config {identity.config_hash}) than the coordinator "
                f"({self.model}, config {self.config_hash}); give both the same files, and with longrope the same "
                "--context."
            )
        if identity.dtype != self.dtype:
            raise PeerMismatch(f"{peer} computes in {identity.dtype}, not in {self.dtype}; give both the same --dtype.")
        hidden, wanted = identity.computed_dtype, self.settled(identity).hidden_dtype or self.dtype
        if hidden != wanted:
            raise PeerMismatch(
                f"{peer} computes with {identity.dtype} weights in {hidden}, not in {wanted} as the rest of the chain: "
                "their processors differ; give all of them a --dtype that each computes in."
            )
        # A stage may hold more room than is needed, but never another number format: hidden states travel as they are.
        self._check_room(peer, identity)
        self._check_ends(peer, identity)
        self._check_hashes(peer, identity)

    def _check_room(self, peer: str, identity: StageIdentity) -> None:
        for name, has, wants in (
            ("a context of {} tokens", identity.context, self.context),
            ("room for trees of {} nodes", identity.node_limit, self.node_limit),
            ("{} slots", identity.num_slots, self.num_slots),
        ):
            if has < wants:
                raise PeerMismatch(f"{peer} has {name.format(has)}, but the coordinator needs {wants}.")

    def check_memory(self, address: str, identity: StageIdentity, like: StageIdentity) -> None:
        """Check that a stage has memory for the rows that it may have to hold in the place of `like`.

        Raises:
            PeerMismatch: it has less.
        """
        # A stage that was asked for more rows than it has memory for would be ended by its system.
        needed = min(like.kv_rows, self.num_slots * slot_rows(self.context + self.node_limit))
        if 0 < identity.kv_rows < needed:
            has = f"KV memory for {identity.kv_rows} rows"
            raise PeerMismatch(f"The stage at {address} has {has}, and {needed} are needed in its place.")

    def _check_ends(self, peer: str, identity: StageIdentity) -> None:
        on_stages = self.ends == "stages"
        embeds, picks = on_stages and identity.start == 0, on_stages and identity.end == self.num_layers
        for end, has, wants in (("embedding", identity.has_embedding, embeds), ("head", identity.has_head, picks)):
            if has and not wants:
                raise PeerMismatch(
                    f"{peer} holds the {end}, which with ends = {self.ends} a stage of layers {identity.layers} must "
                    f"not; start it with the ends where the coordinator wants them."
                )
            if wants and not has:
                raise PeerMismatch(
                    f"{peer} has layers {identity.layers} without the {end}, which belongs there with ends = stages."
                )

    def _check_hashes(self, peer: str, identity: StageIdentity) -> None:
        commits = {identity.model_revision, self.model_revision}
        wanted = self._wanted_hash(identity)
        # Equal weights may be of two commits, but here nothing else shows whether they are equal.
        if not wanted and "" not in commits and len(commits) == 2:
            raise PeerMismatch(
                f"{peer} has {identity.model} of revision {identity.model_revision}, and the coordinator of "
                f"{self.model_revision}; start both with the same --revision."
            )
        if wanted and identity.weights_hash != wanted:
            raise PeerMismatch(
                f"{peer} has other weights for layers {identity.layers} ({identity.weights_hash}) than the "
                f"coordinator ({wanted}); give both the same files."
            )

    def _wanted_hash(self, identity: StageIdentity) -> str:
        """Return the hash that the weights of a stage must have, empty if it is believed."""
        return self.weights_hash(identity) if self.weights_hash is not None else ""

    def _check_commits(self, stages: Sequence[tuple[str, StageIdentity]]) -> None:
        """Check that stages which are believed are of one commit, also where the coordinator's own is unknown."""
        known = [(at, stage) for at, stage in stages if stage.model_revision and not self._wanted_hash(stage)]
        for (before, one), (behind, other) in pairwise(known):
            if one.model_revision != other.model_revision:
                raise PeerMismatch(
                    f"The stage at {behind} has {other.model} of revision {other.model_revision}, and that at {before} "
                    f"of {one.model_revision}; start both with the same --revision."
                )

    def _check_cover(self, stages: Sequence[tuple[str, StageIdentity]]) -> None:
        if not stages:
            raise PeerMismatch("A chain needs at least one stage; name its address.")
        order = "name the stages in the order of their layers"
        address, first = stages[0]
        if first.start != 0:
            raise PeerMismatch(
                f"The first stage, at {address}, has layers {first.layers} and does not begin with layer 0; {order}."
            )
        # Neighbours are enough: a chain covers [0, num_layers) iff it starts at 0, ends at num_layers and every range
        # begins where the one before it ends.
        for (before, one), (behind, other) in pairwise(stages):
            if other.start < one.start:
                raise PeerMismatch(
                    f"The stage at {behind} (layers {other.layers}) stands behind that at {before} (layers "
                    f"{one.layers}); {order}."
                )
            if other.start < one.end:
                raise PeerMismatch(
                    f"The stages at {before} (layers {one.layers}) and {behind} (layers {other.layers}) overlap; every "
                    "layer needs exactly one stage."
                )
            if other.start > one.end:
                raise PeerMismatch(
                    f"Layers {one.end}:{other.start} are missing between the stages at {before} (layers {one.layers}) "
                    f"and {behind} (layers {other.layers})."
                )
        address, last = stages[-1]
        if last.end != self.num_layers:
            raise PeerMismatch(
                f"Layers {last.end}:{self.num_layers} are missing behind the last stage, at {address} (layers "
                f"{last.layers})."
            )
