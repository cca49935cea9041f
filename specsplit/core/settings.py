"""Every setting, read once: command line over environment over file over default.

Environment variables are `SPECSPLIT_<ROLE>_<FIELD>`, the file is TOML with one table per role; both refuse
unknown names. The origin of each value is kept, for messages and `--print-config`.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from specsplit.core.complaints import complaint
from specsplit.core.defaults import DRAFTLESS, EMBEDDED, ENV_CONFIG, ENV_OTHERS, ENV_PREFIX
from specsplit.core.errors import InvalidSettings
from specsplit.core.paths import expanded
from specsplit.core.sections import (
    DraftSettings,
    GatewaySettings,
    OrchestratorSettings,
    StageSettings,
    TargetSettings,
    addresses,
)

_FOREIGN_PREFIXES = ("SPECSPLIT_TEST_", "SPECSPLIT_BENCH_")
"""Prefixes of the variables that switch tests and benchmarks; they are no settings."""
Purpose = Literal["generate", "gateway", "draft", "target", "stage", "check"]
"""The purpose of reading settings: to generate here or over HTTP, to serve a role, or to check the installation."""


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
    stage: StageSettings = StageSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    gateway: GatewaySettings = GatewaySettings()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Source, *others: Source, **named: Source
    ) -> tuple[Source, ...]:
        """Take only the values that are passed: `load_settings` merges the layers, because it keeps their origins."""
        return (init_settings,)

    @property
    def is_remote(self) -> bool:
        """Whether the workers are other processes."""
        return self.target.address is not None

    @property
    def draft_address(self) -> str | None:
        """The remote draft to use; None decodes plainly, or with a draft in this process."""
        return None if self.orchestrator.mode in DRAFTLESS else self.draft.address

    @property
    def draft_source(self) -> str | None:
        """The draft to load into this process; None decodes plainly, or with a remote one."""
        if self.draft.address is not None or self.orchestrator.mode in DRAFTLESS:
            return None
        if self.draft.model is not None or self.is_remote:
            return self.draft.model
        return self.target.draft_model or (EMBEDDED if self.target.model == EMBEDDED else None)

    @property
    def has_local_model(self) -> bool:
        """Whether a model is loaded into this process."""
        return not self.is_remote or self.draft_source is not None

    @property
    def runs_side_by_side(self) -> bool:
        """Whether draft and target of this process work at the same time: their modes mean nothing otherwise.

        `auto` does without: on two cores, in turn was as fast as at once (docs/log.md).
        """
        has_both = self.draft_source is not None and not self.is_remote
        return self.orchestrator.mode in ("overlap", "stream") and has_both

    @property
    def has_draft(self) -> bool:
        return self.draft_source is not None or self.draft_address is not None

    @property
    def speculates(self) -> bool:
        """Whether rounds have trees, of a draft or of lookup."""
        chosen = self.orchestrator
        return chosen.mode != "plain" and (self.has_draft or chosen.lookup)

    @property
    def lacks_draft(self) -> bool:
        """Whether there is no draft, and not by choice."""
        return not self.has_draft and self.orchestrator.mode not in DRAFTLESS


_ROLES: dict[str, type[BaseModel]] = {
    "draft": DraftSettings,
    "target": TargetSettings,
    "stage": StageSettings,
    "orchestrator": OrchestratorSettings,
    "gateway": GatewaySettings,
}
KEYS = tuple(f"{role}.{field}" for role, section in _ROLES.items() for field in section.model_fields)
"""Every setting as role.field."""
BOTH_ENGINES = ("dtype", "device", "threads", "record", "sessions", "queue")
FLAT_KEYS: dict[str, tuple[str, ...]] = {
    **{role: (f"{role}.address",) for role in ("draft", "target")},
    **{f"draft_{name}": (f"draft.{name}",) for name in ("model", "vocab", "context")},
    "target_model": ("target.model",),
    **{name: (f"target.{name}",) for name in ("context", "kv_memory")},
    **{name: (f"draft.{name}", f"target.{name}") for name in BOTH_ENGINES},
    **{name: (f"orchestrator.{name}",) for name in OrchestratorSettings.model_fields},
}
"""The settings by the names of the command line's options and of Pipeline's arguments."""
GATEWAY_KEYS = {
    **FLAT_KEYS,
    "kv_memory": ("draft.kv_memory", "target.kv_memory"),
    "served_name": ("target.served_name",),
    **{name.removesuffix("s"): (f"gateway.{name}",) for name in ("targets", "drafts")},
    **{name: (f"gateway.{name}",) for name in GatewaySettings.model_fields},
}
"""The same for the gateway, whose workers are elsewhere or processes that it starts."""
SERVICE_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    role: {field: (f"{role}.{field}",) for field in _ROLES[role].model_fields if field != "address"}
    for role in ("draft", "target", "stage")
}
"""The same for the command that serves a role; what a target's says of both models holds for the draft beside it."""
SERVICE_KEYS["target"] |= {name: FLAT_KEYS[name] for name in (*BOTH_ENGINES, "draft_vocab", "draft_context")}


@dataclass(frozen=True, slots=True)
class Origin:
    """The layer in which a value was given, and its name there."""

    layer: str
    name: str


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """The merged settings; `origins` has an entry for every key that some layer set."""

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
    given: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    as_options: bool = False,
    purpose: Purpose = "generate",
) -> EffectiveSettings:
    """Merge `given` (by the names of FLAT_KEYS, or SERVICE_KEYS) over environment, settings file and defaults.

    `config` defaults to SPECSPLIT_CONFIG; with `as_options` messages spell `given` as command-line options.

    Raises:
        InvalidSettings: a name is unknown, a value malformed, the file unreadable, or two settings contradict.
    """
    path = config or os.environ.get(ENV_CONFIG)
    is_service = purpose in SERVICE_KEYS
    names = GATEWAY_KEYS if purpose == "gateway" else SERVICE_KEYS.get(purpose, FLAT_KEYS)
    chosen = _from_caller(given or {}, names, as_options)
    layers = [_from_file(Path(path)) if path else {}, _from_environment(), chosen]
    if purpose == "gateway":
        layers = list(map(_addressed, layers))
    merged, chosen = layers[0] | layers[1] | layers[2], layers[2]  # a later layer wins
    if not is_service:
        merged = _placed(merged, chosen)
    elif purpose == "target":
        merged = _cut(merged, chosen)
    settings = _validated(merged)
    if not is_service:
        _refuse_contradictions(settings, merged, purpose)
    return EffectiveSettings(settings, {key: origin for key, (_, origin) in merged.items()})


def _addressed(layer: _Layer) -> _Layer:
    """Return the layer with the first of the gateway's workers of a role as the worker of that role."""
    layer = dict(layer)
    for role in ("target", "draft"):
        listed, origin = layer.get(f"gateway.{role}s", ((), None))
        if listed and origin is not None:
            layer[f"{role}.address"] = cast("Sequence[str]", addresses(listed))[0].rpartition("=")[2], origin
    return layer


def _placed(merged: _Layer, chosen: _Layer) -> _Layer:
    """Decide for each role between a remote worker and a model loaded here: a model that the caller names beats a
    configured address, and a configured draft stays behind if the caller names another target only.

    Raises:
        InvalidSettings: the caller names both for a role, or sets something that only a model loaded here can use.
    """
    roles = ("target", "draft")
    named = [role for role in roles if f"{role}.model" in chosen]
    addressed = [role for role in roles if f"{role}.address" in chosen]
    for role in named:
        if role in addressed:
            raise _both_places(chosen[f"{role}.model"][1], chosen[f"{role}.address"][1])
    dropped = {f"{role}.address" for role in named} | ({"target.draft_model"} if "draft" in named else set[str]())
    if "target" in named and not addressed:
        dropped.add("draft.address")
    merged = {key: entry for key, entry in merged.items() if key not in dropped}
    addresses = [key for key in ("target.address", "draft.address") if key in merged]
    has_target = "target.address" not in merged and ("target.model" in merged or not addresses)
    has_draft = "draft.address" not in merged and "draft.model" in merged
    fields = ("dtype", "device", "threads", "record", "context", "sessions", "kv_memory")
    local = [key for role in roles for field in fields if (key := f"{role}.{field}") in chosen]
    if local and not (has_target or has_draft):
        raise _both_places(chosen[local[0]][1], merged[addresses[0]][1])
    if "draft.address" in merged and (own := [key for key in ("draft.vocab", "draft.context") if key in chosen]):
        raise _both_places(chosen[own[0]][1], merged["draft.address"][1])
    return merged


def _both_places(here: Origin, elsewhere: Origin) -> InvalidSettings:
    # To drop either would ignore something that the user said.
    return InvalidSettings(
        f"{here.name} is for a model loaded here and {elsewhere.name} for a worker elsewhere; leave one out."
    )


def _cut(merged: _Layer, chosen: _Layer) -> _Layer:
    """Decide between remote stages and stages started here for a served target: the layer closer to the user wins.

    Raises:
        InvalidSettings: one layer sets both, or settings of stages are set without stages.
    """
    ways = [key for key in ("target.stages", "target.local_stages") if key in merged and merged[key][0]]
    if len(ways) == 2:
        near, far = sorted(ways, key=lambda key: _nearness(merged[key][1]), reverse=True)
        if _nearness(merged[near][1]) == _nearness(merged[far][1]):
            names = " and ".join(merged[key][1].name for key in ways)
            raise InvalidSettings(f"{names} exclude each other: stages run elsewhere, or are started here.")
        # Spares stand by for remote stages and go with them; spares that the caller named stay, and are refused below.
        left = {far, "target.spares"} - chosen.keys() if far == "target.stages" else {far}
        merged, ways = {key: entry for key, entry in merged.items() if key not in left}, [near]
    for key, why in {"target.spares": "to stand by for", "target.layers": "for the other layers"}.items():
        if key in merged and merged[key][0] and "target.stages" not in ways:
            raise InvalidSettings(f"{merged[key][1].name} needs stages elsewhere {why}; name them with --stages.")
    for key in ("target.ends", "target.retry", "target.step_timeout"):
        if key in chosen and not ways:
            name = chosen[key][1].name
            raise InvalidSettings(f"{name} is for a target cut into stages: name them with --stages, or leave it out.")
    return merged


def _nearness(origin: Origin) -> int:
    """Return the rank of the layer of a value; the layer closer to the user has the higher one."""
    return {"command line": 2, "argument": 2, "environment": 1}.get(origin.layer, 0)


def _refuse_contradictions(settings: Settings, merged: _Layer, purpose: Purpose) -> None:
    has_target = settings.is_remote or "target.model" in merged
    if purpose in ("generate", "gateway") and settings.draft_address is not None and not has_target:
        name = merged["draft.address"][1].name
        raise InvalidSettings(
            f"{name} needs a target as well: name one with --target or --target-model, or leave {name} out."
        )
    mode = settings.orchestrator.mode
    if mode in ("pingpong", "overlap", "stream") and not settings.has_draft:
        option = "--draft" if settings.is_remote else "--draft-model"
        raise InvalidSettings(f"Mode {mode} needs a draft: name one with {option}, or use --mode plain.")
    if mode == "lookup" and not settings.orchestrator.lookup:
        raise InvalidSettings("Mode lookup cannot do without lookup; turn it on, or use --mode plain.")


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
        raise _invalid(error, {}) from None


def _from_environment() -> _Layer:
    variables = {f"{ENV_PREFIX}{key.replace('.', '_').upper()}": key for key in KEYS}
    known = (*variables, *ENV_OTHERS)
    # pydantic-settings ignores variables that it does not know, so misspelt ones are refused here.
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
        tables = tomllib.loads(expanded(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidSettings(f"The settings file {path} cannot be read ({error.strerror}); check --config.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSettings(f"The settings file {path} is not valid TOML ({error}); correct it.") from error
    layer: _Layer = {}
    for role, table in tables.items():
        if role not in _ROLES:
            raise InvalidSettings(f"{path}: {_misplaced(role, role) or _unknown(role, _ROLES, kind='table')}")
        if not isinstance(table, dict):
            raise InvalidSettings(f"{path}: {role} must be a table: write [{role}] above its settings.")
        for field, value in cast("dict[str, Any]", table).items():
            key = f"{role}.{field}"
            if key not in KEYS:
                raise InvalidSettings(f"{path}: {_misplaced(key, field) or _unknown(key, KEYS)}")
            layer[key] = (value, Origin(f"file {path}", f"{key} in {path}"))
    return layer


def _misplaced(written: str, option: str) -> str:
    """Return the sentence for the name of an option that means nothing in that place of the file; else nothing."""
    role, _, field = FLAT_KEYS.get(option, ("",))[-1].partition(".")
    return role and f"There is no setting {written}; what --{option.replace('_', '-')} sets is {field} under [{role}]."


def _from_caller(given: Mapping[str, Any], names: Mapping[str, tuple[str, ...]], as_options: bool) -> _Layer:
    layer: _Layer = {}
    for name, value in given.items():
        if name not in names:
            raise InvalidSettings(_unknown(name, names))
        origin = Origin("command line", f"--{name.replace('_', '-')}") if as_options else Origin("argument", name)
        layer.update(dict.fromkeys(names[name], (value, origin)))
    return layer


def _validated(layer: _Layer) -> Settings:
    sections: dict[str, dict[str, Any]] = {role: {} for role in _ROLES}
    for key, (value, _) in layer.items():
        role, field = key.split(".")
        sections[role][field] = value
    try:
        return Settings(**cast("dict[str, Any]", sections))
    except ValidationError as error:
        raise _invalid(error, {key: origin.name for key, (_, origin) in layer.items()}) from None


def _invalid(error: ValidationError, names: Mapping[str, str]) -> InvalidSettings:
    """Turn the first complaint into one sentence with the user's spelling; raised from None, it is all that shows."""
    place = error.errors(include_url=False)[0]["loc"]
    name = names.get(".".join(str(part) for part in place[:2]), str(place[0]))
    return InvalidSettings(f"{name} {complaint(error)}.")


def _unknown(name: str, known: Iterable[str], kind: str = "setting") -> str:
    # Of names that are equally near the first one is suggested, which is the most usual setting.
    suggestion = max(known, key=lambda item: difflib.SequenceMatcher(None, item.lower(), name.lower()).ratio())
    return f"There is no {kind} {name}; the nearest one is {suggestion}."
