"""The addresses of a gateway's workers elsewhere, by model. Knows no HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from specsplit.core.errors import InvalidSettings
from specsplit.core.settings import Settings
from specsplit.rpc.transport import parse_address


@dataclass(frozen=True, slots=True)
class WorkerLinks:
    """The addresses of one model's workers; without a name it has the target's own."""

    name: str | None
    targets: tuple[str, ...]
    """One, or several replicas."""
    draft: str | None


def worker_links(settings: Settings) -> list[WorkerLinks]:
    """Return the addresses of each model elsewhere; targets of one name are replicas.

    Raises:
        InvalidSettings: names that stand twice, a replica that does, or a draft for no target.
    """
    targets: dict[str | None, list[str]] = {}
    for name, address in map(_named, settings.gateway.targets or _present(settings.target.address)):
        targets.setdefault(name, []).append(address)
    drafts = [_named(entry) for entry in settings.gateway.drafts or _present(settings.draft_address)]
    refuse_repeated((name or "" for name, _ in drafts), role="draft")
    refuse_repeated([""] * len(targets.get(None, ())), role="target")
    for name, addresses in targets.items():
        if len(set(addresses)) < len(addresses):
            raise InvalidSettings(f"A target called {name} stands twice with the same address; name each replica once.")
    by_name = dict(drafts)
    if len(targets) > 1 and None in by_name:
        raise InvalidSettings("Of several targets, a draft has to say whose it is: write --draft NAME=HOST:PORT.")
    unknown = by_name.keys() - targets.keys() - {None}
    if unknown and targets:
        raise InvalidSettings(f"There is no target called {min(map(str, unknown))} for the draft of that name.")
    return [
        WorkerLinks(name, tuple(addresses), by_name.get(name) or by_name.get(None))
        for name, addresses in targets.items()
    ]


def _present(address: str | None) -> tuple[str, ...]:
    return () if address is None else (address,)


def _named(entry: str) -> tuple[str | None, str]:
    """Split [NAME=]HOST:PORT."""
    name, _, address = entry.rpartition("=")
    parse_address(address)
    return name or None, address


def refuse_repeated(names: Iterable[str], role: str = "target") -> None:
    """Refuse names that stand twice.

    Raises:
        InvalidSettings: such a name.
    """
    counts = Counter(names)
    repeated = next((name for name, count in counts.items() if count > 1), None)
    if repeated is not None:
        called = f"called {repeated}" if repeated else "without a name"
        raise InvalidSettings(
            f"There is more than one {role} {called}: give each a name of its own, --{role} NAME=HOST:PORT"
            + (", or replicas of one model the same." if role == "target" else "; the replicas of a target share one.")
        )
