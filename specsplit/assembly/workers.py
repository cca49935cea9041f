"""A target, perhaps a draft, and the orchestrators over them. Knows ports, but neither engines nor clients."""

from __future__ import annotations

import math

from specsplit.core.defaults import DRAFTLESS
from specsplit.core.ports import Drafter, Tokenizer, Verifier
from specsplit.core.sections import OrchestratorSettings
from specsplit.orchestrator.orchestrator import Orchestrator
from specsplit.orchestrator.request import RetryPolicy
from specsplit.speculation.cost_model import RoundMode
from specsplit.speculation.options import Speculation


class Workers:
    """A target, perhaps a draft, and the tokenizer they share; close it when its requests have ended.

    `auto` chooses among `auto_modes` if there is a draft; a stream among them it may choose without one, too.
    `are_on_loop` says that the caller's event loop itself runs the engines, so that nothing can wait for them in vain.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        are_remote: bool = False,
        are_on_loop: bool = False,
        auto_modes: tuple[RoundMode, ...] = ("overlap", "pingpong", "stream"),
    ) -> None:
        self.verifier = verifier
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._are_remote, self._are_on_loop = are_remote, are_on_loop
        self._auto_modes = auto_modes
        self._orchestrators: dict[tuple[Speculation, RetryPolicy], Orchestrator] = {}

    def orchestrator(self, settings: OrchestratorSettings) -> Orchestrator:
        """Return the orchestrator for `settings`, the same for equal ones; all of them share what they learn."""
        speculation = Speculation(
            mode=settings.mode,
            nodes=settings.nodes,
            depth=settings.depth,
            branching=settings.branching,
            lookup=settings.lookup,
            auto_modes=self._auto_modes,
        )
        # In one process draft and target take turns, so giving up on the draft would gain nothing.
        draft_s = settings.draft_patience if self._are_remote else math.inf
        retry_policy = RetryPolicy(retry_s=settings.retry, draft_s=draft_s, can_be_silent=not self._are_on_loop)
        key = (speculation, retry_policy)
        if key not in self._orchestrators:
            drafter = None if settings.mode in DRAFTLESS else self.drafter
            self._orchestrators[key] = Orchestrator(
                self.verifier, drafter, self.tokenizer, speculation, retry_policy=retry_policy
            )
        return self._orchestrators[key]

    async def aclose(self) -> None:
        """End the background tasks of the orchestrators; whoever opened the workers closes them."""
        for orchestrator in self._orchestrators.values():
            await orchestrator.aclose()
