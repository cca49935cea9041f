"""The records that travel between orchestrator, draft and target: plain Python, no tensors.

Legend: V vocabulary. Token ids are ints below V; positions count tokens from the start of the prompt.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specsplit.core.defaults import DEFAULT_PRIORITY, DEFAULT_UNACKNOWLEDGED
from specsplit.core.errors import InvalidRequest
from specsplit.core.exactness import Exactness
from specsplit.core.record import record
from specsplit.limits import MAX_BIAS, MAX_CALLER, MAX_PRIORITY, MAX_REQUEST_ID, MAX_TOP_LOGPROBS

FinishReason = Literal["stop", "length"]
Note = Callable[[str], None]
"""Shows the user one sentence about what is going on."""
PROTOCOL_VERSION = 2
"""Version of the messages between processes; processes of different versions refuse each other."""
ROOT = 0
"""The parent of a root's children in every message."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a token; `temperature` 0 is greedy.

    The processors apply in this order: penalties, `logit_bias`, temperature, `top_k` (0 = off), `top_p`, `min_p`.

    Raises:
        InvalidRequest: a value is out of range or not finite.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 and 100")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.top_k < 1 << 32, "top_k", self.top_k, "0 (off) or a number of tokens below 2^32")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "between -2 and 2")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "between -2 and 2")
        repetition = self.repetition_penalty  # far less than its bound would turn logits into infinities
        _require(0.01 <= repetition <= 100, "repetition_penalty", repetition, "between 0.01 and 100")
        # There may be many biases, so sentences are made only for those that are wrong.
        for token_id, bias in [each for each in self.logit_bias if not (each[0] >= 0 and abs(each[1]) <= MAX_BIAS)]:
            _require(token_id >= 0, "logit_bias", token_id, "keyed by token ids of the vocabulary")
            _require(abs(bias) <= MAX_BIAS, "logit_bias", bias, f"between -{MAX_BIAS:g} and {MAX_BIAS:g}")

    def within(self, vocab_size: int) -> SamplingParams:
        """Return the same without the biases of tokens that a smaller vocabulary lacks."""
        biases = tuple(bias for bias in self.logit_bias if bias[0] < vocab_size)
        return self if len(biases) == len(self.logit_bias) else replace(self, logit_bias=biases)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _require(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:  # NaN fails every comparison, so it ends up here too
        raise InvalidRequest(f"{name} must be {allowed}, not {value}.", param=name)


@dataclass(frozen=True, slots=True)
class SessionParams:
    """The parameters of a session that both workers need before its first round, sent as `Turn.opening`."""

    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    choice: int = 0
    """The n-th choice of one request, as in OpenAI's API; it is part of the noise's key."""
    prompt_length: int = 0
    """Presence and frequency penalties count only the tokens after it."""
    eos_ids: tuple[int, ...] = ()
    """The draft never grows below one of these."""
    max_tokens: int = 0
    top_logprobs: int | None = None
    """Likeliest tokens whose log-probabilities the target answers beside each token's own; None for none at all."""
    priority: int = DEFAULT_PRIORITY
    """0 to 9; of two sessions that wait for a slot, the one with the higher priority goes first."""
    caller: str = ""
    """Whose session it is, as its opener says; a named caller may have no more than its part of a worker's queue."""
    opener: str = field(default="", compare=False)
    """Identity or host of its opener, where that counts instead of `caller`; servers set it, and nobody sends it."""
    request_id: str = ""
    """The request that it is of, for logs."""

    def __post_init__(self) -> None:
        _require(0 <= self.priority <= MAX_PRIORITY, "priority", self.priority, f"between 0 and {MAX_PRIORITY}")
        _require(len(self.caller) <= MAX_CALLER, "caller", len(self.caller), f"of at most {MAX_CALLER} characters")
        is_name = len(self.request_id) <= MAX_REQUEST_ID and self.request_id.isprintable()
        _require(is_name, "request_id", len(self.request_id), f"of at most {MAX_REQUEST_ID} characters, all printable")
        if self.top_logprobs is not None:
            check_top_logprobs(self.top_logprobs)


def check_top_logprobs(count: int) -> None:
    """Check how many of the likeliest tokens are asked for.

    Raises:
        InvalidRequest: fewer than 0, or more than MAX_TOP_LOGPROBS.
    """
    _require(0 <= count <= MAX_TOP_LOGPROBS, "logprobs", count, f"between 0 and {MAX_TOP_LOGPROBS}")


@record
class Turn:
    """The state of one session on one link: the tokens that the worker should hold before it answers.

    The committed tokens are the slot's first `base_length` ids followed by `tail`; `base_hash` is
    `prefix_hash` of those first ids. `opening` is set on the first turn of an epoch and after SlotBehind.
    """

    # The text of a session of which the worker holds the first part:
    #     ids   [0 ... base_length) [base_length ... base_length + len(tail))
    #           in the slot          comes with this turn

    session: str
    epoch: int
    round: int
    base_length: int
    base_hash: int
    tail: tuple[int, ...]
    opening: SessionParams | None = None
    max_wait_s: float | None = field(default=None, compare=False)
    """Seconds that a turn which opens its session may wait for a slot: 0 refuses at once, None is up to the worker."""
    time_left_s: float | None = field(default=None, compare=False)  # until its request is given up; None is never

    @property
    def may_open(self) -> bool:
        """Whether the worker may have to find a slot for this turn."""
        return self.opening is not None and not self.base_length


@record
class Budget:
    """The limits of one propose; `max_new_nodes` counts the nodes returned, the bonus token excluded."""

    max_new_nodes: int
    max_depth: int
    max_branching: int = 1

    def __post_init__(self) -> None:
        for name in ("max_new_nodes", "max_depth", "max_branching"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


@record
class Timings:
    """The parts of a worker's time, all measured where they are spent: `device_ms` around the forwards."""

    wall_ms: float = 0.0
    queue_ms: float = 0.0
    device_ms: float = 0.0
    num_forwards: int = 0
    num_tokens: int = 0
    """Tokens fed to the model."""
    batch_size: int = 1
    step_rows: int = 0
    """Sessions and rows in the largest step that served this call, others' and prompts' too; 0 rows if unknown."""
    sent_bytes: int = 0
    """Bytes of this call's messages as the client counts them; 0 if nothing travelled."""
    received_bytes: int = 0
    sampling_ms: float = 0.0
    """From logits to the next forward or the answer: processors, noise, picks or candidates, and the tree."""


@record
class Proposal:
    """A token tree as parallel arrays; entry i is node number `first_node + i`.

    `parents[i]` is a node number lower than `first_node + i`, or ROOT, the token at `root_position`.
    `log_probs[i]`, one of `quantised_log_probs`, estimates that the node is accepted, given that its parent is.
    """

    # Numbers on one link, through an epoch: [1 ... first_node) sent before, [first_node ... first_node + n) these.
    first_node: int
    root_position: int
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    timings: Timings = field(default=Timings(), compare=False)
    num_skipped: int = field(default=0, compare=False)  # tokens of the text that the draft has no rows for

    def __len__(self) -> int:
        return len(self.token_ids)

    def timed(self, timings: Timings) -> Proposal:
        """Return the same tree with other timings."""
        tree = self.first_node, self.root_position, self.token_ids, self.parents, self.log_probs
        return Proposal(*tree, timings, self.num_skipped)


@record
class TokenLogProb:
    """Log-probability of one of the target's tokens, given all tokens before it, and the likeliest tokens there.

    Values are of log_softmax(logits + logit bias): before penalties, temperature and cuts. They are float32 numbers.
    """

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log-probabilities of as many likeliest tokens as were asked for, best first; of equals the lower id."""


@record
class Verdict:
    """The target's answer: the accepted path and always exactly one bonus token after it."""

    # The slot after a verify: [base | tail | accepted path), which ends at `length`; the bonus token will stand there.

    accepted: tuple[int, ...]
    """Node numbers, root side first."""
    token_ids: tuple[int, ...]
    """The tokens of `accepted`, then the bonus token."""
    length: int
    """Committed tokens in the target's slot; the bonus token is not in it yet."""
    verified: tuple[int, ...] = ()
    """Node numbers that were scored (a target may trim)."""
    timings: Timings = field(default=Timings(), compare=False)
    revision: int = 0
    """`Identity.revision` of the target when the verdict was made."""
    log_probs: tuple[TokenLogProb, ...] = ()
    """One for each of `token_ids` if the session asked for them."""
    num_reused: int = field(default=0, compare=False)
    """Tokens of a session's first turn that needed no forward, since their rows were there."""
    found: Proposal | None = None
    """Nodes among `verified` that a streaming target found itself, numbered from FIRST_FOUND in every commit."""

    @property
    def bonus_token(self) -> int:
        return self.token_ids[-1]

    def timed(self, timings: Timings) -> Verdict:
        """Return the same verdict with other timings."""
        path = self.accepted, self.token_ids, self.length, self.verified
        return Verdict(*path, timings, self.revision, self.log_probs, self.num_reused, self.found)


@record
class StreamLimits:
    """The limits of one streaming verification: the largest tree verified at once, and how far it runs ahead.

    Raises:
        InvalidRequest: a limit is below 1, or below 0 where 0 turns something off.
    """

    max_nodes: int
    max_depth: int
    max_unacknowledged: int = DEFAULT_UNACKNOWLEDGED
    """Commits that the target makes before an acknowledgement of the first of them."""
    lookup_branching: int = 0
    """Children of one node among those that the target finds in the text itself; 0 if it is to find none."""

    def __post_init__(self) -> None:
        for name in ("max_nodes", "max_depth", "max_unacknowledged"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.lookup_branching >= 0, "lookup_branching", self.lookup_branching, "at least 0")


@record
class Scores:
    """The target's answer to a score."""

    tokens: tuple[TokenLogProb, ...]
    """One for each scored token."""
    timings: Timings = field(default=Timings(), compare=False)

    @property
    def log_probs(self) -> tuple[float, ...]:
        """Return the log-probability of each scored token, given all tokens before it."""
        return tuple([token.log_prob for token in self.tokens])


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's answer to a ping; the workers of one pipeline must agree on `vocab_hash`."""

    role: Literal["draft", "target"]
    model: str
    vocab_size: int
    vocab_hash: str
    context: int  # tokens that one session may hold
    max_nodes: int  # of the largest tree it takes, or offers
    tokenizer_hash: str = ""  # of the tokenizer's files; empty if there are none
    weights_hash: str = ""  # of names, sizes and samples of the weight files
    protocol_version: int = PROTOCOL_VERSION
    dtype: str = "fp32"
    device: str = "cpu"
    step_times: tuple[tuple[int, float], ...] = ()  # seconds of a forward by rows, ascending, if measured at the start
    fork_s: float = 0.0  # seconds that each further branch of a tree takes; 0 if nobody measured
    text_token_s: float = 0.0  # seconds that each token of its text adds to a session's forward; 0 if nobody measured
    exactness: Exactness = "near ties"  # whether a row has the same bits in any company
    numerics: str = ""  # fingerprint of the arithmetic; with it and the weights equal, workers of "bits" have the same
    revision: int = 0  # changes of `exactness` or `numerics` since the worker began: a chain may replace a stage
    kv_bytes_per_token: int = 0  # what one token takes of the KV cache; 0 if nobody said
    kv_bytes: int = 0  # bytes that the KV cache may take, if they are why the context is not longer; else 0
    model_revision: str = ""  # commit of the hub that the model's files are of; empty if they are not from there
    has_window: bool = False  # whether it drafts for texts beyond its context, of which it has first and last tokens
    branches_share_text: bool = False  # whether a tree's branches read the text once for all, on a CPU


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model's tokenizer, for a process that has no model: it encodes, decodes and ends a text."""

    hash: str
    eos_ids: tuple[int, ...]
    files: Mapping[str, bytes]
    """Contents by file name; empty if the asker knew `hash` already."""


def quantised_log_probs(log_probs: Iterable[float]) -> tuple[float, ...]:
    """Return the nearest log-probabilities that fit one byte: 0 to -15.9375 in steps of 1/16.

    Every drafter rounds so, in process too, so that a transport changes nothing.
    """
    return tuple([-min(round(min(-log_prob, 16.0) * 16), 255) / 16 for log_prob in log_probs])


def prefix_hash(token_ids: Sequence[int], before: int = 0) -> int:
    """Return the 4-byte hash of a token prefix; `before` is the hash of what precedes `token_ids`."""
    return zlib.crc32(struct.pack(f"<{len(token_ids)}I", *token_ids), before)


def prefix_hashes(token_ids: Sequence[int], before: int = 0) -> list[int]:
    """Return the prefix hash after each token."""
    hashes: list[int] = []
    for token in token_ids:
        before = zlib.crc32(token.to_bytes(4, "little"), before)
        hashes.append(before)
    return hashes
