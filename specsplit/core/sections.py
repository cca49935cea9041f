"""The settings of each role: names, types, bounds and defaults, checked by pydantic. Knows no source of values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode

from specsplit.core import defaults
from specsplit.core.defaults import EMBEDDED, Dtype, EndsAt, Mode, PrefixReuse
from specsplit.core.types import SamplingParams
from specsplit.limits import MAX_PRIORITY, MAX_TOP_LOGPROBS


def _strings(value: object) -> object:
    """Read a list of strings from the environment: a JSON list, or else one string as it is."""
    if not isinstance(value, str):
        return value
    try:
        listed = json.loads(value)
    except ValueError:
        return [value]
    return cast("list[object]", listed) if isinstance(listed, list) else [value]


def _biases(value: object) -> object:
    """Read biases from ID=X strings, comma-separated in the environment, or from a table of the settings file."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[object, object]", value).items())
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return entries
    return [_bias(entry) if isinstance(entry, str) else entry for entry in cast("list[object]", entries)]


def _bias(entry: str) -> tuple[str, str]:
    token_id, found, bias = entry.partition("=")
    if not found:
        raise ValueError("must look like ID=X, a token id and what to add to its logit")
    return token_id.strip(), bias.strip()


def _object(value: object) -> object:
    """Read an object from JSON in the environment or an option."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError('must be a JSON object, such as {"enable_thinking": false}') from None


def _address(value: str) -> str:
    """Check HOST:PORT, where HOST is a name, an IPv4 address or an IPv6 address in brackets."""
    # The port is checked as text first: int() would take signs, blanks and digits of other scripts.
    host, _, port = value.rpartition(":")
    is_plain = host and not any(character in host for character in " :/@[]")
    is_bracketed = host.startswith("[") and host.endswith("]") and host.count(":") > 1
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= _MAX_PORT
    if not (is_plain or is_bracketed) or not is_port:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:7001")
    return value


def _remote(value: str) -> str:
    if int(_address(value).rpartition(":")[2]) == 0:
        raise ValueError("must name the port on which the worker listens")
    return value


def addresses(value: object) -> object:
    """Read addresses from one string, comma-separated or a JSON list, or from a list of the settings file."""
    # A JSON list begins with ["; a bare [ may begin an IPv6 address.
    if not isinstance(value, str) or value.lstrip().startswith('["'):
        return _strings(value)
    return [part.strip() for part in value.split(",")]


def _threads(value: object) -> object:
    return None if value == "auto" else value


def _layer_range(value: str) -> str:
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", value)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError("must look like A:B, from layer A to layer B - 1, such as 0:12")
    return value


def _match(pattern: str, rule: str, value: str) -> str:
    if re.fullmatch(pattern, value) is None:
        raise ValueError(f"must be {rule}")
    return value


_MAX_PORT = 65535
Device = Annotated[str, AfterValidator(partial(_match, r"cpu|cuda(:[0-9]{1,3})?", "cpu, cuda or a GPU as cuda:N"))]
Layers = Annotated[str, AfterValidator(_layer_range)]
ModelSource = Annotated[str, Field(min_length=1)]
_NAME = r"[\w.:/@+-]{1,128}", "letters, digits and any of .:/@+_-, at most 128"
ServedName = Annotated[str, AfterValidator(partial(_match, *_NAME))]
Positive = Annotated[int, Field(ge=1)]
Threads = Annotated[Annotated[int, Field(ge=1, le=1024)] | None, BeforeValidator(_threads)]
"""None lets the model's own forwards decide."""
KVMemory = Annotated[str, BeforeValidator(str)]
"""Bytes with a unit or a fraction; whoever loads the model reads it."""
NotNegative = Annotated[int, Field(ge=0)]
Context = Annotated[int, Field(ge=2)]
Address = Annotated[str, AfterValidator(_remote)]
Given = Annotated[str | None, BeforeValidator(lambda value: value or None)]
"""Empty is as good as none, so that a process that starts another one can take a setting of the environment away."""
GivenAddress = Annotated[Annotated[str, AfterValidator(_address)] | None, BeforeValidator(lambda value: value or None)]
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(addresses)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
StepSeconds = Annotated[float, Field(ge=1, allow_inf_nan=False)]
"""Stages are pinged once a second, so a shorter limit would notice nothing sooner."""


class _Frozen(BaseModel):
    # Unknown names are refused, so that a misspelt setting is never ignored.
    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkSettings(_Frozen):
    """How a role's links to other processes are secured; see docs/security.md."""

    tls_cert: Given = None
    tls_key: Given = None
    tls_ca: Given = None
    insecure: bool = False  # whether links without certificates may leave this machine


class LoggedSettings(LinkSettings):
    """The settings of every role that serves somebody: its log, and whose names its metrics have beside ours."""

    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_compat: Literal["vllm"] | None = None


class ServiceSettings(LoggedSettings):
    """The settings of every role that serves calls or HTTP."""

    health: GivenAddress = None
    """A port for health checks alone, in plaintext: the probes of Kubernetes show no certificate."""
    metrics: GivenAddress = None
    """A port for Prometheus alone, in plaintext: it has numbers and the model's name, and no secret."""


class ModelSettings(ServiceSettings):
    """The settings of every role that loads a model, or a part of one."""

    model: ModelSource | None = None
    listen: Annotated[str, AfterValidator(_address)] = defaults.LISTEN  # port 0 picks a free one
    dtype: Dtype | None = None
    device: Device = defaults.DEVICE
    record: bool = True  # whether the forward is recorded at load
    context: Context | None = None
    kv_memory: KVMemory | None = None  # memory for the rows of all slots; by default every slot may be full
    drain: Seconds = defaults.DRAIN_S


class WorkerSettings(ModelSettings):
    """One worker: a remote one by its `address`, or else one that runs here, served or in process."""

    address: Address | None = None  # the address of a remote worker to use; a process that serves the role ignores it
    threads: Threads = None
    served_name: ServedName | None = None
    sessions: Positive | None = None
    """KV slots; by default SERVED_SESSIONS or more in a service, LOCAL_SESSIONS in a Pipeline, 1 for a lone prompt."""
    queue: NotNegative | None = None
    """Requests that may wait for a slot in a service; by default QUEUE_PER_SESSION for each of its sessions."""
    step_tokens: Positive | None = None  # tokens and nodes of a service's step; by default what its times give
    prefill_chunk: Positive | None = None  # tokens of one prompt in such a step
    caller_sessions: Positive | None = None  # sessions and tokens of one caller; None for any number
    caller_tokens_per_second: PositiveNumber | None = None
    prefix_reuse: PrefixReuse = defaults.PREFIX_REUSE
    session_ttl: PositiveNumber = defaults.SESSION_TTL_S


class DraftSettings(WorkerSettings):
    """The draft; without a model, the embedded one if the target is embedded or a draft service is started."""

    vocab: Annotated[str, Field(min_length=1)] | None = None
    """Tokens that its head computes: the N lowest, all, or a file's; by default 32,768 of a large one on a CPU."""


class TargetSettings(WorkerSettings):
    """The target; the settings after the model are for a served target that is cut by layers over stages."""

    model: ModelSource = EMBEDDED  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen, so narrower is safe)
    caller_streams: Positive | None = None
    draft_model: Given = None  # a draft that the same process serves, too, with the settings of the draft
    layers: Layers | None = None  # the first layers, which it holds itself; the stages have the others
    stages: Addresses = ()  # addresses of the stages, in the order of their layers
    spares: Addresses = ()
    local_stages: Positive | None = None  # the number of stage processes to start here instead
    ends: EndsAt = defaults.ENDS
    retry: Seconds = defaults.RETRY_S  # seconds for which stages that cannot be reached are tried again at the start
    step_timeout: StepSeconds = defaults.STEP_TIMEOUT_S
    """Seconds on one step after which a stage is taken to hang, even if it answers pings."""

    @property
    def is_cut(self) -> bool:
        """Whether its layers are on stages."""
        return bool(self.stages) or self.local_stages is not None


class StageSettings(ModelSettings):
    """One stage of a target: layers A to B - 1 of `layers` = A:B."""

    model: ModelSource = EMBEDDED  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen, so narrower is safe)
    layers: Layers | None = None
    ends: EndsAt = defaults.ENDS
    """With `stages`, the stage of layer 0 has the embedding and that of the last layer the head."""
    next: Addresses = ()
    threads: Positive | None = None
    sessions: Positive = defaults.SERVED_SESSIONS


class GatewaySettings(ServiceSettings):
    """The HTTP server, and the workers elsewhere whose models it serves, each as [NAME=]HOST:PORT."""

    http: Annotated[str, AfterValidator(_address)] = defaults.HTTP
    targets: Annotated[tuple[str, ...], NoDecode, BeforeValidator(addresses)] = ()
    drafts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(addresses)] = ()
    api_key_file: str | None = None
    lmtp: GivenAddress = None
    log_messages: str | None = None
    log_prompts: bool = False
    allow_anonymous: bool = False
    max_body_mib: Positive = 1
    caller_requests: Positive | None = None  # requests under way and tokens of one key; None for any number
    caller_tokens_per_second: PositiveNumber | None = None
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    retry: Seconds | None = None
    """Seconds for which a target that is lost is tried again; None waits longer if the gateway restarts it itself."""
    drain: Seconds = defaults.DRAIN_S


class OrchestratorSettings(LinkSettings):
    """How rounds are run, and the values of a request that it does not set itself."""

    mode: Mode = defaults.MODE
    nodes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """None: DEFAULT_NODES in a fixed mode, and in `auto` what it chooses; `depth` alike, but for a chain by default."""
    depth: Annotated[int, Field(ge=1, le=64)] | None = None
    branching: Annotated[int, Field(ge=1, le=64)] | None = None
    lookup: bool = defaults.LOOKUP
    """Whether trees also hold the tokens that followed earlier occurrences of the last ones."""
    max_new_tokens: Positive = defaults.MAX_NEW_TOKENS
    temperature: float = defaults.TEMPERATURE
    top_p: float = defaults.TOP_P
    top_k: int = defaults.TOP_K
    min_p: float = defaults.MIN_P
    presence_penalty: float = defaults.PRESENCE_PENALTY
    frequency_penalty: float = defaults.FREQUENCY_PENALTY
    repetition_penalty: float = defaults.REPETITION_PENALTY
    logit_bias: Annotated[tuple[tuple[int, float], ...], NoDecode, BeforeValidator(_biases)] = ()
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Likeliest tokens whose log-probabilities come beside each token's own; 0 for its own alone, None for none."""
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_strings)] = ()
    ignore_eos: bool = False
    chat: bool = False
    chat_template_kwargs: Annotated[dict[Any, Any], NoDecode, BeforeValidator(_object)] = {}
    """Variables of the chat template; whoever makes a request checks them, by what the template reads."""
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = defaults.DEFAULT_PRIORITY
    timeout: PositiveNumber | None = None  # seconds from the request to its deadline
    retry: Seconds = defaults.RETRY_S  # seconds for which an unreachable target is tried again
    draft_patience: PositiveNumber = defaults.DRAFT_PATIENCE_S
    """Seconds after which a draft counts as slow, at least; no round waits longer, and those of `auto` less."""
    audit: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the rounds that another target recomputes
    auditor: Address | None = None  # a target that is trusted to do that, and serves nobody; else replicas do it

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequest: a value is out of range.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
        )
