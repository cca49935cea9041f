"""The settings of a draft that a target's process serves, too: its own, and those that it takes from the target."""

from __future__ import annotations

from dataclasses import replace

from specsplit.core.errors import InvalidSettings
from specsplit.core.sections import DraftSettings, TargetSettings
from specsplit.core.settings import EffectiveSettings

_TAKEN = (
    *("device", "sessions", "queue", "prefix_reuse", "session_ttl"),
    *("caller_sessions", "caller_tokens_per_second"),
)
"""Settings that the draft takes from the target, unless it has its own."""


def share_device(target: TargetSettings, draft: DraftSettings) -> bool:
    """Return whether both compute on the same device."""
    return len({"cuda:0" if each.device == "cuda" else each.device for each in (target, draft)}) == 1


def with_draft(effective: EffectiveSettings) -> EffectiveSettings:
    """Return a target's settings with those of the draft that its process serves as well, if it serves one.

    Raises:
        InvalidSettings: there can be none beside this target, or there is none for what the command line says of it.
    """
    target = effective.settings.target
    if target.draft_model is None:
        refuse_options_of_no_draft(effective)
        return effective
    both, name = beside(effective, target.draft_model), effective.origins["target.draft_model"].name
    draft = both.settings.draft
    if target.is_cut:
        raise InvalidSettings(f"{name} is for a whole target: start a draft beside stages with specsplit draft.")
    if not share_device(target, draft):
        raise InvalidSettings(
            f"{name} is for a draft on the target's device: start one on {draft.device} with specsplit draft."
        )
    if target.tls_cert:
        raise InvalidSettings(
            f"{name} goes without certificates, each of which proves one role: start the draft with specsplit draft."
        )
    return both


def refuse_options_of_no_draft(effective: EffectiveSettings) -> None:
    """Refuse what the caller says of a draft; for settings that name none.

    Raises:
        InvalidSettings: there is such an option or argument.
    """
    for origin in filter(None, map(effective.origins.get, ("draft.vocab", "draft.context"))):
        # The environment and the settings file may be for other commands as well.
        if origin.layer in ("command line", "argument"):
            option = "--draft-model" if origin.layer == "command line" else "draft_model"
            raise InvalidSettings(f"{origin.name} is for a draft: name one with {option}, or leave it out.")


def beside(effective: EffectiveSettings, draft_model: str) -> EffectiveSettings:
    """Return a target's settings with those of the draft that it names: the draft's own, else the target's."""
    target, origins = effective.settings.target, effective.origins
    taken = {
        name: f"target.{name}" for name in _TAKEN if f"draft.{name}" not in origins and f"target.{name}" in origins
    }
    values = {name: getattr(target, name) for name in taken} | {"model": draft_model}
    places = {"model": "target.draft_model"} | taken
    return replace(
        effective,
        settings=effective.settings.model_copy(
            update={"draft": effective.settings.draft.model_copy(update=values)},
        ),
        origins={**origins, **{f"draft.{name}": origins[place] for name, place in places.items()}},
    )
