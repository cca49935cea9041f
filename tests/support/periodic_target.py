"""A fake target whose text repeats itself, so that lookup is always right."""

from __future__ import annotations

from specsplit.core.types import Proposal, Verdict
from tests.support.fakes import FakeSlot, FakeTarget
from tests.support.timed_workers import TimedTarget


class PeriodicTarget(FakeTarget):
    """A target whose text has a period of seven tokens."""

    def _pick(self, token_ids: list[int]) -> int:
        return token_ids[-7]

    def _walk(self, slot: FakeSlot, proposal: Proposal, parents: list[int]) -> Verdict:  # type: ignore[override]
        at, accepted, token_ids = -1, list[int](), list[int]()
        while True:
            pick = self._pick(slot.ids)
            token_ids.append(pick)
            at = next((n for n in range(len(proposal)) if parents[n] == at and proposal.token_ids[n] == pick), -2)
            if at < 0:
                break
            accepted.append(at)
            slot.extend([pick])
        first = proposal.first_node
        verified = tuple(range(first, first + len(proposal)))
        return Verdict(tuple(first + n for n in accepted), tuple(token_ids), len(slot.ids), verified)


class TimedPeriodicTarget(PeriodicTarget, TimedTarget):
    """The same, taking time."""
