"""The log of a chain: what happened to its stages, each incident once. Knows no server and no engine."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from specsplit.core.exactness import shown_exactness

if TYPE_CHECKING:
    from specsplit.stages.chain.runner import ChainRunner
    from specsplit.stages.wire.remote_chain import RemoteChain

_log = logging.getLogger(__name__)
_MOST_REASONS = 5
"""Reasons that are logged while a chain is not whole: some have numbers that change with every try."""


class ChainLog:
    """Logs the incidents of a chain, each once: that it is not whole, spares, moves, and every row sent again."""

    def __init__(self, link: RemoteChain, runner: ChainRunner) -> None:
        self._link, self._statistics = link, runner.chain_statistics
        self._last: object = None
        self._reasons: list[str] = []
        """The logged reasons why the chain is not whole; none while it is."""
        self._num_spares = self._num_moved = 0
        self._numerics: tuple[str, ...] = ()

    def write_new(self) -> None:
        """Log what happened since the last call."""
        self._write_trouble()
        self._write_numerics()
        link = self._link.statistics
        for address in link.spares_used[self._num_spares :]:
            _log.warning("the spare at %s took a stage's place", address)
        if link.num_moved_slots > self._num_moved:
            _log.warning("%d slots were moved, with their rows", link.num_moved_slots - self._num_moved)
        self._num_spares, self._num_moved = len(link.spares_used), link.num_moved_slots
        latest = list(self._statistics.resent)
        # The latest entries only are kept, so the last one logged may be gone: then all of them are new.
        known = next((index for index, resent in enumerate(latest) if resent is self._last), -1)
        for resent, count in Counter(latest[known + 1 :]).items():  # a chain that is down is tried often
            times = f", {count} times" if count > 1 else ""
            _log.warning(
                "sent again: %d tokens of slot %d (%s)%s", resent.num_tokens, resent.slot, resent.reason, times
            )
        self._last = latest[-1] if latest else None

    def _write_trouble(self) -> None:
        """Log that the chain is not whole, with every reason that is found for it, and that it is whole again."""
        trouble = self._link.trouble
        if trouble is None:
            if self._reasons:
                _log.warning("the chain is whole again")
            self._reasons = []
        elif str(trouble) not in self._reasons and len(self._reasons) < _MOST_REASONS:
            _log.warning("the chain is not whole: %s", trouble)
            self._reasons.append(str(trouble))

    def _write_numerics(self) -> None:
        """Log once that stages differ in their numerics: together they promise no bits."""
        link = self._link
        numerics = tuple(shown_exactness(identity) for identity in link.identities)
        if numerics != self._numerics and len(set(numerics)) > 1:
            said = "; ".join(f"{at}: {how}" for at, how in zip(link.addresses, numerics, strict=False))
            _log.warning(
                "the stages have different numerics: texts may differ from plain decoding at near ties (%s)", said
            )
        self._numerics = numerics
