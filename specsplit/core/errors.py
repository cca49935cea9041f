"""The one error tree. Each boundary translates once into it and never leaks a foreign exception.

SpecSplitError
├── UsageError                  the user's request or settings are wrong (exit code 2)
│   ├── InvalidRequest          a parameter of a request: sampling values, prompt, tree, budget
│   │   └── ContextExceeded     the prompt does not fit the context
│   └── InvalidSettings         unknown or malformed settings
├── ModelError                  a model cannot be used (exit code 1)
│   ├── ModelNotFound           missing folder, unknown hub id, gated or unreachable repository
│   ├── ModelDamaged            truncated, pickled or inconsistent files
│   ├── ModelUnsupported        an architecture or feature that cannot run here
│   └── VocabularyMismatch      draft and target do not share a vocabulary
├── ResourceError               this machine cannot do it (exit code 1)
│   ├── DeviceUnavailable       no such device
│   ├── OutOfMemory             weights or KV slots do not fit
│   ├── NoFreeSlot              every KV slot is in use
│   │   └── Overloaded          and no place to wait is left, or the caller has its share; says when to come back
│   ├── WorkerClosed            the engine has been shut down
│   └── MissingExtra            an optional dependency is not installed
├── LinkError                   another process cannot be reached or does not behave (exit code 1)
│   ├── WorkerUnreachable       refused, cut, draining, or silent for longer than a keepalive
│   ├── DeadlineExceeded        no answer in time
│   ├── WorkerFailed            it answered that its own code failed
│   ├── PeerMismatch            another role or protocol version than was asked for
│   ├── AccessDenied            our identity may not make this call, or the session is another identity's
│   ├── WrongResult             an audit found tokens that were shown, or those of a target without a judge, wrong
│   ├── CorruptPacket           a stage packet was damaged on its way
│   └── InvalidPacket           a stage packet that arrived whole says what cannot be
└── SessionError                the session contract between orchestrator and worker
    ├── SlotBehind              the slot holds fewer tokens than base_length, or other ones
    ├── StageBehind             a stage's slots hold fewer rows than a packet builds on, or other ones
    ├── StaleRound              a round lower than the last one of this epoch
    └── StaleEpoch              an epoch lower than the session's
"""

from __future__ import annotations

from specsplit.limits import MIN_RETRY_S


class SpecSplitError(Exception):
    """Base of every error that SpecSplit raises on purpose; its text is one sentence for the user."""

    exit_code = 1


class UsageError(SpecSplitError):
    """The request or a setting is wrong; asking differently helps."""

    exit_code = 2


class InvalidRequest(UsageError):
    """A request parameter is out of range; `param` names it where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextExceeded(InvalidRequest):
    """The prompt leaves no room for a token within the context."""


class InvalidSettings(UsageError):
    """A setting is unknown, malformed or contradicts another one."""


class ModelError(SpecSplitError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """There is no such model, or it cannot be reached."""


class ModelDamaged(ModelError):
    """The model's files are incomplete, contradictory or of a refused format."""


class ModelUnsupported(ModelError):
    """The model works, but not inside this engine."""


class VocabularyMismatch(ModelError):
    """Draft and target have different vocabularies."""


class ResourceError(SpecSplitError):
    """This machine lacks something."""


class DeviceUnavailable(ResourceError):
    """The device asked for does not exist here."""


class OutOfMemory(ResourceError):
    """Weights, KV slots or the forward of one session do not fit the memory; several go in smaller steps."""


class NoFreeSlot(ResourceError):
    """Every KV slot is in use."""


class Overloaded(NoFreeSlot):
    """No place to wait is left, or the caller has reached a `limit` of its own; ask again `retry_after_s` later."""

    def __init__(self, message: str, retry_after_s: float, limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_s, self.limit = max(MIN_RETRY_S, retry_after_s), limit


class WorkerClosed(ResourceError):
    """The engine has been shut down."""


class MissingExtra(ResourceError):
    """An optional dependency is not installed."""


class LinkError(SpecSplitError):
    """Another process cannot be reached or does not behave."""


class WorkerUnreachable(LinkError):
    """The worker refuses, was cut off, is draining, or is silent for longer than a keepalive."""


class DeadlineExceeded(LinkError):
    """No answer came in time."""


class WorkerFailed(LinkError):
    """The worker answered that its own code failed."""


class PeerMismatch(LinkError):
    """The other process has another role or protocol version than was asked for."""


class AccessDenied(LinkError):
    """The identity that our certificate proves may not make this call, or the session belongs to another one."""


class WrongResult(LinkError):
    """An audit found that targets of one model compute different tokens, too late or without a third to judge them."""


class SessionError(SpecSplitError):
    """A request broke, or lost, the session contract."""


class SlotBehind(SessionError):
    """The slot holds only `have` of the tokens that `base_length` claims.

    If `is_preempted`, the worker needed the memory for older sessions.
    """

    def __init__(self, have: int, peer: str = "The worker", *, is_preempted: bool = False) -> None:
        why = ", since the memory went to older ones" if is_preempted else ""
        super().__init__(f"the slot holds {have} tokens of this session{why}")
        self.have, self.peer, self.is_preempted = have, peer, is_preempted


class StaleRound(SessionError):
    """The session has already seen a later round of this epoch."""


class StaleEpoch(SessionError):
    """The session has already seen a later epoch."""


class CorruptPacket(LinkError):
    """A packet was damaged on `link`; nothing in it, its header included, can be trusted."""

    def __init__(self, link: str) -> None:
        super().__init__(f"A stage packet was damaged on its way over {link}.")
        self.link = link


class InvalidPacket(LinkError):
    """A stage packet arrived as it was sent, and says what cannot be; nothing was computed."""


class StageBehind(SessionError):
    """A stage's slots hold only `have` rows (by slot) of those that a packet builds on; nothing was computed."""

    def __init__(self, have: dict[int, int]) -> None:
        held = ", ".join(f"{rows} of slot {slot}" for slot, rows in have.items())
        super().__init__(f"a stage holds too few rows: {held}")
        self.have = dict(have)
