"""The default of every setting, once and free of imports, so that `--help` shows them without loading the settings."""

from __future__ import annotations

from typing import Literal

Mode = Literal["auto", "plain", "lookup", "pingpong", "overlap", "stream"]
DRAFTLESS: tuple[Mode, ...] = ("plain", "lookup")
"""Modes that ask no draft."""
Dtype = Literal["fp32", "bf16", "fp16"]
DeviceName = Literal["cpu", "cuda"]
Role = Literal["draft", "target"]
"""Of a worker."""
EndsAt = Literal["stages", "coordinator"]
"""Where a target that is cut by layers has its embedding, final norm and head."""

EMBEDDED = "embedded"
"""The model source that names the pair inside the package; each role finds its own half."""
ENV_PREFIX = "SPECSPLIT_"
ENV_CONFIG = "SPECSPLIT_CONFIG"
"""The settings file, where `--config` does not name one."""
ENV_DEBUG = "SPECSPLIT_DEBUG"
"""Set to anything but 0 to see the traceback of an error."""

DEVICE: DeviceName = "cpu"
ENDS: EndsAt = "stages"
MODE: Mode = "auto"

DEFAULT_NODES = 4
"""Tree nodes verified per round; this and the next two were measured on the embedded pair."""
DEFAULT_DEPTH = 3
DEFAULT_BRANCHING = 2
DEFAULT_MAX_NODES = 32
"""What mode auto may verify per round."""
LOOKUP = True

MAX_NEW_TOKENS = 128
TEMPERATURE = 0.0
TOP_P = 1.0
TOP_K = 0
MIN_P = 0.0
PRESENCE_PENALTY = 0.0
FREQUENCY_PENALTY = 0.0
REPETITION_PENALTY = 1.0

LISTEN = "127.0.0.1:0"
SERVED_SESSIONS = 4
"""KV slots of a worker that serves; in process there is one."""
SESSION_TTL_S = 60.0
DRAIN_S = 10.0
RETRY_S = 30.0
STEP_TIMEOUT_S = 30.0
"""A stage that is on one step for so long hangs, even if it answers."""
DRAFT_PATIENCE_S = 0.25
