"""The default of every setting, free of imports, so that `--help` shows them without loading the settings."""

from __future__ import annotations

from typing import Literal

Mode = Literal["auto", "plain", "lookup", "pingpong", "overlap", "stream"]
DRAFTLESS: tuple[Mode, ...] = ("plain", "lookup")
"""Modes that ask no draft."""
Dtype = Literal["fp32", "bf16", "fp16", "int8", "int4"]
DeviceName = str
Role = Literal["draft", "target"]
PrefixReuse = Literal["off", "caller", "all"]
"""Whose rows a session may begin with, if they are of the same first tokens."""
EndsAt = Literal["stages", "coordinator"]
"""The place of the embedding, final norm and head of a target that is cut by layers."""

EMBEDDED = "embedded"
"""The model source that names the pair inside the package; each role finds its own half."""
ENV_PREFIX = "SPECSPLIT_"
ENV_CONFIG = "SPECSPLIT_CONFIG"  # the variable that names the settings file if `--config` does not
ENV_DEBUG = "SPECSPLIT_DEBUG"  # the variable that shows the traceback of an error if it is set to anything but 0
ENV_CPU_KERNEL = "SPECSPLIT_CPU_KERNEL"  # the variable that leaves out our kernels for a CPU if it is 0
ENV_API_KEY = "SPECSPLIT_API_KEY"  # the variable with the key that `chat --endpoint` shows
ENV_OTHERS = (ENV_CONFIG, ENV_DEBUG, ENV_CPU_KERNEL, ENV_API_KEY)  # those that are no settings

DEVICE: DeviceName = "cpu"
ENDS: EndsAt = "stages"
MODE: Mode = "auto"

DEFAULT_PRIORITY = 5
DEFAULT_CONTEXT = 4096  # upper limit of the default context; `--context` allows a longer one
DEFAULT_DRAFT_CONTEXT = 1024  # the same of a draft on a CPU, which would read for long (docs/log.md, 2026-11-29)
DEFAULT_NODE_LIMIT = 128  # tree rows behind a slot's committed tokens
DEFAULT_UNACKNOWLEDGED = 8  # commits that a streaming target makes before it hears that the first of them arrived
DEFAULT_NODES = 4
"""Tree nodes verified in a fixed mode, and in `auto` at first; these three were measured on the embedded pair."""
DEFAULT_DEPTH = 3
DEFAULT_BRANCHING = 2
LOOKUP = True

MAX_NEW_TOKENS = 128
TEMPERATURE = 0.0
TOP_P = 1.0
TOP_K = 0
MIN_P = PRESENCE_PENALTY = FREQUENCY_PENALTY = 0.0
REPETITION_PENALTY = 1.0

LISTEN = "127.0.0.1:0"
HTTP = "127.0.0.1:8000"
SERVED_SESSIONS, MOST_SERVED, QUEUE_PER_SESSION = 4, 16, 32
"""KV slots of a worker that serves, up to how many if the memory easily holds them, and waiting requests for each."""
LOCAL_SESSIONS = 8
"""KV slots of a model in a Pipeline's own process, or as many as the memory easily holds."""
CONCURRENCY = 4
"""Prompts of a file that are answered at once: as many as each worker that serves has slots."""
PREFIX_REUSE: PrefixReuse = "caller"
SESSION_TTL_S = 60.0
DRAIN_S = 10.0
RETRY_S = 30.0
STEP_TIMEOUT_S = 30.0
"""A stage that works on one step for longer than this is taken to hang, even if it answers pings."""
DRAFT_PATIENCE_S = 0.25
