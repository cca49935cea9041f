"""Every setting, read once: command line over environment over file over default.

Environment variables are `SPECSPLIT_<ROLE>_<FIELD>`, the file is TOML with one table per role; both refuse
unknown names. Where each value came from is kept, for messages and `--print-config`.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from specsplit.core import defaults
from specsplit.core.defaults import EMBEDDED, ENV_CONFIG, ENV_DEBUG, ENV_PREFIX, Device, Dtype, Mode
from specsplit.core.errors import InvalidSettings
from specsplit.core.types import SamplingParams

_OTHER_VARIABLES = (ENV_CONFIG, ENV_DEBUG)
_FOREIGN_PREFIXES = ("SPECSPLIT_TEST_", "SPECSPLIT_BENCH_")
"""Switches of the test suite and the benchmarks, no settings."""


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


ModelSource = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Context = Annotated[int, Field(ge=2)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DraftSettings(_Frozen):
    """The draft; without a model, the embedded one where the target is embedded, and none elsewhere."""

    model: ModelSource | None = None
    dtype: Dtype | None = None
    device: Device = defaults.DEVICE
    threads: Positive | None = None
    context: Context | None = None


class TargetSettings(_Frozen):
    """The target."""

    model: ModelSource = EMBEDDED
    dtype: Dtype | None = None
    device: Device = defaults.DEVICE
    threads: Positive | None = None
    context: Context | None = None


class OrchestratorSettings(_Frozen):
    """How rounds are run, and what a request takes where it does not say otherwise."""

    mode: Mode = defaults.MODE
    nodes: Annotated[int, Field(ge=1, le=1024)] = defaults.DEFAULT_NODES
    depth: Annotated[int, Field(ge=1, le=64)] = defaults.DEFAULT_DEPTH
    branching: Annotated[int, Field(ge=1, le=64)] = defaults.DEFAULT_BRANCHING
    max_new_tokens: Positive = defaults.MAX_NEW_TOKENS
    temperature: float = defaults.TEMPERATURE
    top_p: float = defaults.TOP_P
    top_k: int = defaults.TOP_K
    min_p: float = defaults.MIN_P
    presence_penalty: float = defaults.PRESENCE_PENALTY
    frequency_penalty: float = defaults.FREQUENCY_PENALTY
    repetition_penalty: float = defaults.REPETITION_PENALTY
    logit_bias: Annotated[tuple[tuple[int, float], ...], NoDecode, BeforeValidator(_biases)] = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode, BeforeValidator(_strings)] = ()
    ignore_eos: bool = False
    chat: bool = False

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


class Settings(BaseSettings):
    """All roles of one process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
    )

    draft: DraftSettings = DraftSettings()
    target: TargetSettings = TargetSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Source,
        env_settings: Source,
        dotenv_settings: Source,
        file_secret_settings: Source,
    ) -> tuple[Source, ...]:
        """Take values only as given: `load_settings` merges the layers, since it has to know where each came from."""
        return (init_settings,)

    @property
    def draft_source(self) -> str | None:
        """The draft to load; None decodes plainly."""
        if self.orchestrator.mode == "plain":
            return None
        if self.draft.model is None and self.target.model == EMBEDDED:
            return EMBEDDED
        return self.draft.model

    @property
    def lacks_draft(self) -> bool:
        """Whether decoding is plain for want of a draft, not by choice."""
        return self.draft_source is None and self.orchestrator.mode != "plain"


_ROLES: dict[str, type[BaseModel]] = {
    "draft": DraftSettings,
    "target": TargetSettings,
    "orchestrator": OrchestratorSettings,
}
KEYS = tuple(f"{role}.{field}" for role, section in _ROLES.items() for field in section.model_fields)
"""Every setting as role.field."""
_BOTH_ENGINES = ("dtype", "device", "threads")
FLAT_KEYS: dict[str, tuple[str, ...]] = {
    "draft_model": ("draft.model",),
    "target_model": ("target.model",),
    "context": ("target.context",),
    **{name: (f"draft.{name}", f"target.{name}") for name in _BOTH_ENGINES},
    **{name: (f"orchestrator.{name}",) for name in OrchestratorSettings.model_fields},
}
"""The settings by the names of the command line's options and of Pipeline's arguments."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was given, and its name there."""

    layer: str
    name: str


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """The merged settings; `origins` has an entry for each key that is not at its default."""

    settings: Settings
    origins: Mapping[str, Origin]

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (role.field, value, layer) of every setting."""
        values = self.settings.model_dump()
        found = self.origins
        return [
            (key, values[role][field], found[key].layer if key in found else "default")
            for key in KEYS
            for role, field in [key.split(".")]
        ]


_Layer = dict[str, tuple[Any, Origin]]


def load_settings(
    given: Mapping[str, Any] | None = None, *, config: str | Path | None = None, as_options: bool = False
) -> EffectiveSettings:
    """Merge `given` (by the names of FLAT_KEYS) over the environment, the settings file and the defaults.

    `config` defaults to SPECSPLIT_CONFIG; with `as_options` messages spell `given` as command-line options.

    Raises:
        InvalidSettings: a name is unknown, a value malformed, the file unreadable, or two settings contradict.
    """
    env_layer = _from_environment()
    path = config or os.environ.get(ENV_CONFIG)
    merged = {**(_from_file(Path(path)) if path else {}), **env_layer, **_from_caller(given or {}, as_options)}
    settings = _validated(merged)
    if settings.orchestrator.mode == "pingpong" and settings.draft_source is None:
        raise InvalidSettings("Mode pingpong needs a draft: name one with --draft-model, or use --mode plain.")
    return EffectiveSettings(settings, {key: origin for key, (_, origin) in merged.items()})


def override(settings: OrchestratorSettings, **given: Any) -> OrchestratorSettings:
    """Return `settings` with the values of one request; None leaves a setting as it is.

    Raises:
        InvalidSettings: a name is unknown or a value malformed.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    for name in changes:
        if name not in OrchestratorSettings.model_fields:
            raise InvalidSettings(_unknown(name, OrchestratorSettings.model_fields))
    try:
        return OrchestratorSettings.model_validate({**settings.model_dump(), **changes})
    except ValidationError as error:
        raise _invalid(error, {}) from error


def _from_environment() -> _Layer:
    variables = {f"{ENV_PREFIX}{key.replace('.', '_').upper()}": key for key in KEYS}
    known = (*variables, *_OTHER_VARIABLES)
    for name in os.environ:
        upper = name.upper()
        is_ours = upper.startswith(ENV_PREFIX) and not upper.startswith(_FOREIGN_PREFIXES)
        if is_ours and upper not in known:
            raise InvalidSettings(_unknown(name, known, kind="environment variable"))
    values = EnvSettingsSource(Settings)()
    names = {key: name for name, key in variables.items()}
    return {
        f"{role}.{field}": (value, Origin("environment", names[f"{role}.{field}"]))
        for role, section in values.items()
        for field, value in section.items()
    }


def _from_file(path: Path) -> _Layer:
    try:
        tables = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(f"The settings file {path} cannot be read ({error.strerror}); check --config.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"The settings file {path} is not valid TOML ({error}); correct it.") from error
    layer: _Layer = {}
    for role, table in tables.items():
        if role not in _ROLES:
            raise InvalidSettings(f"{path}: {_unknown(role, _ROLES, kind='table')}")
        if not isinstance(table, dict):
            raise InvalidSettings(f"{path}: {role} must be a table: write [{role}] above its settings.")
        for field, value in cast("dict[str, Any]", table).items():
            key = f"{role}.{field}"
            if key not in KEYS:
                raise InvalidSettings(f"{path}: {_unknown(key, KEYS)}")
            layer[key] = (value, Origin(f"file {path}", f"{key} in {path}"))
    return layer


def _from_caller(given: Mapping[str, Any], as_options: bool) -> _Layer:
    layer: _Layer = {}
    for name, value in given.items():
        if name not in FLAT_KEYS:
            raise InvalidSettings(_unknown(name, FLAT_KEYS))
        origin = Origin("command line", f"--{name.replace('_', '-')}") if as_options else Origin("argument", name)
        layer.update(dict.fromkeys(FLAT_KEYS[name], (value, origin)))
    return layer


def _validated(layer: _Layer) -> Settings:
    sections: dict[str, dict[str, Any]] = {role: {} for role in _ROLES}
    for key, (value, _) in layer.items():
        role, field = key.split(".")
        sections[role][field] = value
    try:
        return Settings(**cast("dict[str, Any]", sections))
    except ValidationError as error:
        raise _invalid(error, {key: origin.name for key, (_, origin) in layer.items()}) from error


def _invalid(error: ValidationError, names: Mapping[str, str]) -> InvalidSettings:
    """Turn the first complaint into one sentence that names the setting as the user spelled it."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    name = names.get(key, str(first["loc"][0]))
    rule = first["msg"].split(", unable to parse")[0]
    for prefix, replacement in (("Input should be ", "must be "), ("Value error, ", ""), ("String should ", "must ")):
        if rule.startswith(prefix):
            rule = replacement + rule.removeprefix(prefix)
    given = f", not {first['input']!r}" if isinstance(first["input"], str | int | float) else ""
    return InvalidSettings(f"{name} {rule}{given}.")


def _unknown(name: str, known: Iterable[str], kind: str = "setting") -> str:
    known = list(known)
    nearest = difflib.get_close_matches(name.lower(), [item.lower() for item in known], n=1, cutoff=0.0)
    suggestion = next(item for item in known if item.lower() == nearest[0])
    return f"There is no {kind} {name}; the nearest one is {suggestion}."
