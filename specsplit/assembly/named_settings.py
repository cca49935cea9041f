"""Checks of single settings whose errors name them as the user did: as an option, a variable or a line of a file."""

from __future__ import annotations

from specsplit.core.errors import InvalidSettings
from specsplit.core.settings import EffectiveSettings
from specsplit.model.memory_size import parse_memory


def check_memory(effective: EffectiveSettings, *roles: str) -> None:
    """Refuse a size of the KV cache of one of the roles that is none.

    Raises:
        InvalidSettings: there is one.
    """
    for role in roles:
        origin = effective.origins.get(f"{role}.kv_memory")
        if origin is not None:
            parse_memory(getattr(effective.settings, role).kv_memory, origin.name)


def check_insecure(effective: EffectiveSettings, role: str) -> None:
    """Refuse links of a role that are to have certificates and to do without.

    Raises:
        InvalidSettings: the settings say both.
    """
    section, origins = getattr(effective.settings, role), effective.origins
    named = [f"{role}.{name}" for name in ("tls_cert", "tls_key", "tls_ca") if getattr(section, name)]
    if section.insecure and named:
        insecure, certificate = origins[f"{role}.insecure"].name, origins[named[0]].name
        raise InvalidSettings(
            f"{insecure} is for links without certificates, and {certificate} names one; leave one out."
        )
