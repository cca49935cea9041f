"""The settings of whoever generates or checks: those of core, with the draft that the target's settings may name.

Services of one role read theirs by `load_settings` alone. Imports neither torch nor grpc.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from specsplit.assembly.draft_beside import beside, refuse_options_of_no_draft
from specsplit.assembly.named_settings import check_insecure, check_memory
from specsplit.core.defaults import EMBEDDED
from specsplit.core.errors import InvalidSettings
from specsplit.core.settings import EffectiveSettings, Settings, load_settings


def generation_settings(
    given: Mapping[str, Any],
    *,
    config: str | Path | None = None,
    as_options: bool = False,
    purpose: Literal["generate", "gateway", "check"] = "generate",
) -> EffectiveSettings:
    """Return what `load_settings` does; if a target here names the draft beside it, that is the draft.

    Raises:
        InvalidSettings: as `load_settings`; or two drafts are named, or something is set for a draft and there is none,
            or the target to generate with is one cut into stages that no process has started.
    """
    effective = _with_targets_draft(load_settings(given, config=config, as_options=as_options, purpose=purpose))
    if not _names_draft(effective.settings):
        refuse_options_of_no_draft(effective)
    if purpose == "generate":
        _refuse_stages(effective)
    if purpose == "gateway":
        check_insecure(effective, "gateway")
    if purpose != "check":  # which goes on behind a wrong setting
        check_memory(effective, "target", "draft")
    return effective


def no_draft_note(settings: Settings) -> str | None:
    """Return the sentence for a target that has no draft, unless that is the user's choice."""
    if not settings.lacks_draft:
        return None
    how = "guessing from the text alone" if settings.speculates else "decoding plainly"
    return f"No draft for this target: {how}; name one with {'--draft' if settings.is_remote else '--draft-model'}."


def _with_targets_draft(effective: EffectiveSettings) -> EffectiveSettings:
    """Return settings whose draft is the one that the target's name, unless target or draft are elsewhere."""
    settings, origins = effective.settings, effective.origins
    named, own = settings.target.draft_model, settings.draft.model
    if named is None or settings.is_remote or settings.draft.address is not None:
        return effective
    if own is not None and own != named:
        both = " and ".join(origins[key].name for key in ("draft.model", "target.draft_model"))
        raise InvalidSettings(f"{both} name two drafts, {own} and {named}; leave one of them out.")
    return beside(effective, named)


def _refuse_stages(effective: EffectiveSettings) -> None:
    """Refuse a target cut into stages: its coordinator serves, and a process that generates loads whole models."""
    target = effective.settings.target
    if not effective.settings.is_remote and target.is_cut:
        name = effective.origins["target.stages" if target.stages else "target.local_stages"].name
        raise InvalidSettings(
            f"{name} is for a target cut into stages, which is served: start it with specsplit target and name its "
            "address with --target, or start specsplit serve."
        )


def _names_draft(settings: Settings) -> bool:
    """Return whether there would be a draft in a mode that uses one."""
    is_embedded = settings.target.model == EMBEDDED and not settings.is_remote
    return is_embedded or settings.draft.model is not None or settings.draft.address is not None
