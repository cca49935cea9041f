"""The seams: engines implement them in process, RPC clients remotely, fakes in tests; one contract suite covers all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specsplit.core.types import Budget, Identity, Proposal, Scores, StreamLimits, TokenizerFiles, Turn, Verdict


class Drafter(Protocol):
    """Proposes token trees; an accelerator, never a dependency."""

    async def ping(self) -> Identity: ...

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        """Grow the session's tree and return the nodes numbered above `known_nodes`.

        `budget.max_branching` limits what grows now; what a wider call found before may be among the nodes.

        Raises:
            SlotBehind: the slot holds fewer or other tokens than `turn` claims.
            StaleEpoch, StaleRound: a later epoch or round was seen.
        """
        ...

    async def close(self, session: str) -> None:
        """Free the session's slot; unknown sessions are ignored."""
        ...


class VerifyStream(Protocol):
    """One session's streaming verification: proposals go in at any time, commits come out as they are made."""

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        """Hand over nodes without waiting; `root_position` acknowledges the commits up to it.

        Node numbers rise through the stream; a parent may be any node of it. Nodes that hang on tokens which the text
        has left are dropped. `is_more_coming` says that it may pay to wait for further ones.

        Raises:
            InvalidRequest: the tree is malformed; a stream to another process says so with the next commit.
        """
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a commit, or the end, has come already."""
        ...

    async def next_commit(self) -> Verdict | None:
        """Return what the target committed next, in the order of the text; None once the stream has ended well.

        Raises what `verify` does, and LinkError where the stream was cut.
        """
        ...

    async def close(self, *, keeps_slot: bool = False) -> None:
        """End the stream; the session's slot is freed unless it `keeps_slot`, for unary rounds of a higher epoch."""
        ...


class Verifier(Protocol):
    """Owns the truth: its picks are the text."""

    async def ping(self) -> Identity: ...

    async def verify(self, turn: Turn, proposal: Proposal) -> Verdict:
        """Score the tree in one forward, keep the accepted path, answer it and the bonus token.

        Raises:
            InvalidRequest: the tree is malformed or reaches beyond the context.
            SlotBehind: the slot holds fewer or other tokens than `turn` claims.
            StaleEpoch, StaleRound: a later epoch or round was seen.
        """
        ...

    def open_stream(self, turn: Turn, limits: StreamLimits) -> VerifyStream:
        """Begin to verify what is proposed, and to commit without being asked, from `turn` on: the first of its epoch.

        Without nodes to verify the target goes on plainly, or waits for some where that is faster. It stops behind an
        end-of-text token, at the session's `max_tokens`, or where the context ends. Errors show in the stream.
        """
        ...

    async def score(
        self, prompt: Sequence[int], scored: Sequence[int], logit_bias: Sequence[tuple[int, float]] = ()
    ) -> Scores:
        """Return the log-probability of each token of `scored` after `prompt` and those before it, at temperature 1.

        They are of log_softmax(logits + bias) and finite; biases of tokens outside the vocabulary are ignored.

        Raises:
            InvalidRequest: nothing to score, an empty prompt, or a token outside the vocabulary.
            ContextExceeded: the two do not fit the context.
            NoFreeSlot: every slot is in use.
        """
        ...

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        """Return the model's tokenizer; without the files where their hash is `known_hash`.

        Raises:
            ModelDamaged: the model has no tokenizer files.
        """
        ...

    async def close(self, session: str) -> None:
        """Free the session's slot; unknown sessions are ignored."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_hash(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens included."""
        ...

    def encode_chat(self, user_message: str) -> list[int]:
        """Return the ids of the chat template around one user message.

        Raises:
            InvalidRequest: the model has no chat template.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out; incomplete UTF-8 becomes U+FFFD."""
        ...

    @property
    def token_bytes(self) -> Callable[[int], bytes] | None:
        """What one token adds to the text's UTF-8, wherever it stands; None where that depends on its neighbours.

        A text is then what its tokens' bytes decode to, as `decode` does.
        """
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float: ...
