"""The records of the orchestrator's interface: a request goes in, chunks and a result come out.

Knows neither workers nor rounds; this is the first and the last station on the route of a token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from specsplit.core.defaults import DEFAULT_PRIORITY, DRAFT_PATIENCE_S, RETRY_S, Mode
from specsplit.core.errors import InvalidRequest
from specsplit.core.exactness import Exactness
from specsplit.core.record import record
from specsplit.core.types import (
    FinishReason,
    Identity,
    Proposal,
    SamplingParams,
    TokenLogProb,
    Verdict,
    check_top_logprobs,
)
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.context_limit import context_exceeded
from specsplit.orchestrator.degraded import DegradedPhase, Replay
from specsplit.orchestrator.wire import JsonValue, Wire
from specsplit.speculation.cost_model import Decision, RoundMode

Piece = tuple[str, bool]
"""Some text, and whether the draft had proposed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation: a prompt, how its tokens are picked, and where it ends.

    `seed` None lets the orchestrator draw one; `eos_ids` None takes the tokenizer's; `timeout_s` None takes the
    orchestrator's.
    With `ignore_eos` an end-of-sequence token is a token like any other.

    Raises:
        InvalidRequest: a value is out of range whatever the model.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default=SamplingParams())
    seed: int | None = None
    choice: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_ids: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end it as well, whatever `ignore_eos` says; their text is left out."""
    timeout_s: float | None = None
    """Seconds from the start of the request until it is given up."""
    began_s: float | None = None
    """The event loop's time of that start, for several that share one deadline; None for when its stream begins."""
    logprobs: int | None = None
    """Likeliest tokens whose log-probabilities come beside each token's own; 0 for its own alone, None for none."""
    priority: int = DEFAULT_PRIORITY
    """0 to 9; of two requests that wait for a slot, the one with the higher priority goes first."""
    caller: str = ""
    """Whose request it is; a named caller may have no more than its part of a worker's queue."""
    request_id: str = ""
    """Its name in the logs of all processes; empty for none."""

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            check_top_logprobs(self.logprobs)
        _check_timeout(self.timeout_s)
        if not self.prompt_ids:
            raise InvalidRequest("The prompt is empty; give it at least one token.", param="prompt")
        if self.max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.", "max_new_tokens")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InvalidRequest(f"seed must be between 0 and 2^64 - 1, not {self.seed}.", param="seed")
        if not 0 <= self.choice < 1 << 32:
            raise InvalidRequest(f"choice must be between 0 and 2^32 - 1, not {self.choice}.", param="choice")
        if "" in self.stop:
            raise InvalidRequest("A stop string is empty; leave it out or give it some text.", param="stop")

    def check_fits(self, target: Identity, num_new: int = 1) -> None:
        """Check the request against the target that is to serve it.

        Raises:
            ContextExceeded: the prompt leaves no room for `num_new` tokens.
            InvalidRequest: a token id lies outside the vocabulary.
        """
        vocab_size = target.vocab_size
        if len(self.prompt_ids) + num_new > target.context:
            raise context_exceeded(len(self.prompt_ids), target)
        if not 0 <= min(self.prompt_ids) <= max(self.prompt_ids) < vocab_size:
            raise InvalidRequest(f"The prompt has a token id outside the vocabulary of {vocab_size}.", param="prompt")
        named = {
            "logit_bias": [token_id for token_id, _ in self.sampling.logit_bias],
            "stop_token_ids": self.stop_token_ids,
        }
        for param, token_ids in named.items():
            if max(token_ids, default=0) >= vocab_size:
                raise InvalidRequest(f"{param} names a token id outside the vocabulary of {vocab_size}.", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long workers are waited for, in seconds.

    `timeout_s` bounds a whole request (None: no bound). Without a bound, `retry_s` is how long a target that cannot be
    reached is asked again. It bounds each attempt, too, if a worker `can_be_silent`: those on this event loop answer or
    fail before anybody could wait. A draft that takes longer than its tree could save, and than `draft_s`, counts as
    slow; what comes later than a round waits for is not offered any more.

    Raises:
        InvalidRequest: a value is out of range.
    """

    timeout_s: float | None = None
    retry_s: float = RETRY_S
    draft_s: float = DRAFT_PATIENCE_S
    can_be_silent: bool = True
    waits_when_full: bool = True
    """Whether a request comes back to a target whose queue is full; otherwise its refusal is raised at once."""
    rng: random.Random = field(default_factory=random.Random, compare=False, repr=False)
    """Jitters the pauses between attempts, so that clients do not come back all at once."""

    def __post_init__(self) -> None:
        _check_timeout(self.timeout_s)
        if not 0 <= self.retry_s < math.inf:
            raise InvalidRequest(f"retry_s must be 0 or more seconds, not {self.retry_s}.", param="retry_s")
        if not self.draft_s > 0:
            raise InvalidRequest(f"draft_s must be more than 0 seconds, not {self.draft_s}.", param="draft_s")


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise InvalidRequest(f"timeout_s must be more than 0 seconds, not {timeout_s}.", param="timeout_s")


@record
class RoundFacts:
    """How one round was run, and why."""

    number: int
    """0 for the prompt's."""
    mode: RoundMode
    num_nodes: int
    """Verified."""
    num_accepted: int
    verify_s: float
    decision: Decision | None
    """The decision of `auto`: its plan, and the best plan of every mode with the tokens per second predicted for it."""
    tree: Proposal
    """The nodes that the target was sent."""
    verdict: Verdict
    path_length: int
    """Nodes on the longest drafted path that begins with the accepted ones; 0 if none was verified."""


@record
class Chunk:
    """The part of the answer that one round added.

    Text lags behind tokens where a character or a possible stop string is not complete yet. When the last chunk comes,
    both workers are freeing the request's slots; the next request finds them free.
    """

    token_ids: tuple[int, ...]
    """Ids of the tokens that the round added."""
    accepted: tuple[bool, ...]
    """For each of `token_ids`, whether it was drafted and accepted, or is the target's own pick."""
    pieces: tuple[Piece, ...]
    """The text in parts, each with whether the draft had proposed it."""
    finish_reason: FinishReason | None = None
    """Why the answer ends, in the last chunk; None in the others."""
    result: Result | None = None
    """The finished generation, in the last chunk; None in the others."""
    degraded: str | None = None
    """The worker that did not do its part in this round, and why, such as "draft unreachable"; None if both did."""
    facts: RoundFacts | None = None
    """How the round was run, and why."""
    logprobs: tuple[TokenLogProb, ...] = ()
    """One log-probability for each of `token_ids` if the request asked for them."""

    @property
    def text(self) -> str:
        """Return the text of all pieces, which may be empty."""
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """The parts of a request's time, in seconds."""

    ttft_s: float
    """Seconds from the request to its first token."""
    decode_s: float
    """Seconds from the first token to the last one."""
    tokens_per_s: float
    """Tokens after the first, per second of `decode_s`; 0 where there are none."""
    draft_device_s: float = 0.0
    """Seconds of the draft's forwards within `decode_s`."""
    target_device_s: float = 0.0
    """Seconds of the target's forwards within `decode_s`."""
    draft_waited_s: float = 0.0
    """The part of `draft_device_s` during which the text waited for the draft, at least."""
    queue_s: float = 0.0
    """The part of `ttft_s` during which the request waited at the target: for a slot, and for its first step."""


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """How well the draft did, over the rounds with at least one scored node, before any stop cuts the tokens.

    A round's path is the longest drafted one that begins with the accepted nodes: all nodes of a chain, one branch of
    a tree.
    """

    num_spec_steps: int = 0
    """Rounds with at least one scored node."""
    num_draft_tokens: int = 0
    """Tree nodes that the target scored."""
    num_path_tokens: int = 0
    """Nodes on the rounds' paths."""
    num_accepted_draft_tokens: int = 0
    """Nodes that the target accepted."""
    acceptance_histogram: tuple[int, ...] = ()
    """Entry k counts the rounds that accepted k nodes."""
    tested_by_depth: tuple[int, ...] = ()
    """Entry d counts the rounds whose accepted path offered the target at least one node at depth d + 1."""
    accepted_by_depth: tuple[int, ...] = ()
    """Entry d counts those of them in which one matched."""
    num_ahead_rounds: int = 0
    """Rounds during which the draft went on growing the tree."""
    num_kept_rounds: int = 0
    """Those of them whose outcome was in the tree when the verdict came."""

    @property
    def hit_rate(self) -> float:
        """Share of the rounds drafted ahead whose outcome was in the tree when the verdict came."""
        return _ratio(self.num_kept_rounds, self.num_ahead_rounds)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round with a scored node, bonus token included, as vLLM defines it; 1 without such a round."""
        return 1 + _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted nodes per node drafted along the path."""
        return _ratio(self.num_accepted_draft_tokens, self.num_path_tokens)

    @property
    def node_acceptance_rate(self) -> float:
        """Accepted nodes per tree node."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the published fields, in JSON types."""
        return {
            "num_spec_steps": self.num_spec_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "node_acceptance_rate": self.node_acceptance_rate,
            "acceptance_histogram": list(self.acceptance_histogram),
            "tested_by_depth": list(self.tested_by_depth),
            "accepted_by_depth": list(self.accepted_by_depth),
            "num_ahead_rounds": self.num_ahead_rounds,
            "num_kept_rounds": self.num_kept_rounds,
            "hit_rate": self.hit_rate,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished generation; `str(result)`, and so `print`, is its text."""

    token_ids: tuple[int, ...]
    """Ids of the answer's tokens, with the end-of-sequence token or the token that completed a stop string."""
    text: str
    """The answer, without end-of-sequence token and stop string."""
    prompt_token_ids: tuple[int, ...]
    """Ids of the prompt's tokens."""
    finish_reason: FinishReason
    """`stop` at an end-of-sequence token or a stop string, `length` at `max_new_tokens` or the end of the context."""
    seed: int
    """The seed that was used, given or drawn; with it the same request has the same text."""
    mode: Mode
    """The mode that the request asked for."""
    timings: RequestTimings
    """The parts of the request's time, in seconds."""
    speculative_decoding: SpeculativeDecoding
    """How well the draft did."""
    num_rounds: int
    """Rounds after the prompt's."""
    target_forwards: int
    """Forwards of the target for this request, those of the prompt included."""
    draft_forwards: int
    """Forwards of the draft for this request."""
    degraded: tuple[DegradedPhase, ...] = ()
    """The rounds in which a worker did not do its part, by worker and reason; empty if there are none."""
    resyncs: tuple[Replay, ...] = ()
    """The times that a worker lost tokens and was sent them again; empty if there are none."""
    rounds_by_mode: Mapping[RoundMode, int] = field(default_factory=dict[RoundMode, int])
    """Rounds after the prompt's, counted by the mode in which they were run."""
    wire: Wire | None = None
    """Bytes that travelled; None where nothing travelled: every worker is in this process."""
    exactness: Exactness = "near ties"
    """Whether the text is that of plain decoding, bit for bit: every target that computed a part of it promises so."""
    numerics: str = ""
    """Fingerprint of the targets' arithmetic; empty if they differed or it is unknown."""
    dtype: str = ""
    """Number format of the target's weights; empty if it is unknown."""
    exactness_reason: str = ""
    """Why a text that was begun with the promise of bits lost it; empty if it did not."""
    logprobs: tuple[TokenLogProb, ...] = ()
    """One log-probability for each of `token_ids` if the request asked for them."""
    num_reused_tokens: int = 0
    """Tokens of the prompt that the target did not forward: it had their rows from a request that began likewise."""
    audit: AuditCounts | None = None
    """Counts of what the audit of rounds found; None if no round was to be audited."""

    def __str__(self) -> str:
        return self.text

    @property
    def tokens_per_target_forward(self) -> float:
        """Tokens per forward of the target, all rounds and the prompt's forwards included; 0 without a forward."""
        return _ratio(len(self.token_ids), self.target_forwards)

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the fields that the command line and the API publish, in JSON types."""
        logprobs: dict[str, JsonValue] = {}
        if self.logprobs:
            logprobs = {"logprobs": list(map(_logprob, self.token_ids, self.logprobs))}
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            **logprobs,
            "prompt_token_ids": list(self.prompt_token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "dtype": self.dtype,
            "exactness": self.exactness,
            "numerics": self.numerics,
            "exactness_reason": self.exactness_reason,
            "mode": self.mode,
            "timings": asdict(self.timings),
            "speculative_decoding": self.speculative_decoding.to_dict(),
            "tokens_per_target_forward": self.tokens_per_target_forward,
            "num_rounds": self.num_rounds,
            "rounds_by_mode": {str(mode): count for mode, count in self.rounds_by_mode.items()},
            "target_forwards": self.target_forwards,
            "num_reused_tokens": self.num_reused_tokens,
            "draft_forwards": self.draft_forwards,
            "degraded": [phase.to_dict() for phase in self.degraded],
            "resyncs": [resync.to_dict() for resync in self.resyncs],
            **({} if self.wire is None else {"wire": self.wire.to_dict()}),
            **({} if self.audit is None else {"audit": self.audit.to_dict()}),
        }


def _logprob(token_id: int, token: TokenLogProb) -> dict[str, JsonValue]:
    """Return an entry as in `logprobs.content` of OpenAI's chat completions, with ids in the place of texts."""
    top: list[dict[str, JsonValue]] = [
        {"token_id": likely_id, "logprob": log_prob} for likely_id, log_prob in token.top
    ]
    return {"token_id": token_id, "logprob": token.log_prob, "top_logprobs": top}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
