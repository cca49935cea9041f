"""The ports: engines implement them in process, RPC clients remotely, fakes in tests; one contract suite covers all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NotRequired, Protocol, TypedDict

from specsplit.core.types import Budget, Identity, Proposal, Scores, StreamLimits, TokenizerFiles, Turn, Verdict

TemplateValue = bool | int | float | str  # of a variable of a chat template
Variables = Mapping[str, TemplateValue]


class Drafter(Protocol):
    """A draft: proposes token trees. It is an accelerator, never a dependency."""

    # Rounds of a session rise. A repeat of the last one gets the answer that it had the first time, so a retry is safe.

    async def ping(self) -> Identity: ...

    async def propose(self, turn: Turn, known_nodes: int, budget: Budget) -> Proposal:
        """Grow the session's tree and return the nodes numbered above `known_nodes`, the last number received.

        `budget.max_branching` limits the nodes that grow now; those of an earlier, wider call may be among the answer.

        Raises:
            SlotBehind: the slot holds fewer or other tokens than `turn` claims.
            StaleEpoch, StaleRound: a later epoch or round was seen.
        """
        ...

    async def close(self, session: str) -> None:
        """Free the session's slot; unknown sessions are ignored."""
        ...


class VerifyStream(Protocol):
    """One session's streaming verification: proposals go in at any time, commits come out as they are made.

    A target that streams does not wait for the client; see docs/algorithms.md, section 4.
    """

    def propose(self, proposal: Proposal, *, is_more_coming: bool) -> None:
        """Hand over nodes without waiting; `root_position` acknowledges the commits up to it.

        Node numbers rise through the stream; a parent may be any node of it. Nodes that hang on tokens which the text
        has left are dropped. `is_more_coming` says whether waiting for further nodes may pay.

        Raises:
            InvalidRequest: the tree is malformed; a stream to another process says so with the next commit.
        """
        ...

    @property
    def is_ready(self) -> bool:
        """Whether `next_commit` would answer at once: a commit or the end has arrived."""
        ...

    async def next_commit(self) -> Verdict | None:
        """Return what the target committed next, in the order of the text; None once the stream has ended well.

        Raises what `verify` raises, and LinkError if the stream was cut.
        """
        ...

    async def close(self, *, keeps_slot: bool = False) -> None:
        """End the stream; the session's slot is freed unless it `keeps_slot`, for unary rounds of a higher epoch."""
        ...


class Verifier(Protocol):
    """A target: its picks are the text."""

    # The slot is a cache of the committed tokens, which the caller owns: a verify states what it takes for granted.

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
        """Begin a stream that verifies proposals and commits without being asked; `turn` is the first of its epoch.

        Without nodes to verify the target decodes plainly, or waits for nodes if that is faster. It stops behind an
        end-of-text token, at the session's `max_tokens`, or at the end of the context. Errors are raised by the stream.
        """
        ...

    async def score(
        self,
        prompt: Sequence[int],
        scored: Sequence[int],
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int = 0,
        keep_for: str | None = None,
    ) -> Scores:
        """Return the log-probability of each token of `scored` after `prompt` and those before it, at temperature 1.

        Each is an entry of log_softmax(logits + bias), and finite; biases of tokens outside the vocabulary are ignored.
        With `top_logprobs` the likeliest so many tokens at each position are answered, too. Rows of the prompt may be
        those of the caller `keep_for`, whose next session or score may begin with these; None uses and keeps none.

        Raises:
            InvalidRequest: nothing to score, no prompt, an unknown token, or more than MAX_TOP_LOGPROBS likeliest ones.
            ContextExceeded: the two do not fit the context.
            NoFreeSlot: every slot is in use.
        """
        ...

    async def tokenizer_files(self, known_hash: str = "") -> TokenizerFiles:
        """Return the model's tokenizer; without the files if their hash is `known_hash`.

        Raises:
            ModelDamaged: the model has no tokenizer files.
        """
        ...

    async def close(self, session: str) -> None:
        """Free the session's slot; unknown sessions are ignored."""
        ...


class ChatMessage(TypedDict):
    """One message of a conversation; the template knows the roles, and may tell the speaker's name."""

    role: str
    content: str
    name: NotRequired[str]


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_hash(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens included."""
        ...

    def encode_messages(
        self, messages: Sequence[ChatMessage], variables: Variables | None = None, *, continues: bool = False
    ) -> list[int]:
        """Return the ids of a conversation, whose last message with `continues` is the answer's beginning.

        Raises InvalidRequest: the model has no chat template, or it refuses these messages, or reads no such variable.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token within a text, that of a special token included."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, by default without special tokens; incomplete UTF-8 becomes U+FFFD."""
        ...

    @property
    def token_bytes(self) -> Callable[[int], bytes] | None:
        """The bytes that each token adds to the UTF-8 of `decode`'s text; None if they depend on its neighbours."""
        ...

    def fallback_byte(self, token_id: int) -> bytes:
        """Return the one byte that a token stands for in a vocabulary with byte fallback; empty for other tokens."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float: ...
