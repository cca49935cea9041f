"""A session's view of a target whose verdicts are audited before anybody commits them.

A verdict that is rejected is as good as none: the same tree is verified again by the target that the session is at now.
"""

from __future__ import annotations

from dataclasses import replace

from specsplit.core.ports import Verifier
from specsplit.core.types import Identity, Proposal, StreamLimits, Verdict
from specsplit.orchestrator.audit import Audit
from specsplit.orchestrator.retry import Retrier
from specsplit.orchestrator.session_contract import SessionContract
from specsplit.orchestrator.target_client import NodeFeed, TargetClient


class AuditedTarget(TargetClient):
    """A target client that returns only verdicts which `audit` accepts."""

    def __init__(
        self,
        verifier: Verifier,
        identity: Identity,
        contract: SessionContract,
        retrier: Retrier,
        limits: StreamLimits,
        audit: Audit,
    ) -> None:
        super().__init__(verifier, identity, contract, retrier, limits)
        self._audit = audit

    async def verify(self, proposal: Proposal) -> Verdict:
        """Do what a target client does.

        Raises what it raises, and WrongResult as `Audit.accepts` does.
        """
        verdict = await super().verify(proposal)
        while not await self._is_accepted(verdict):
            self._raise_epoch(is_reported=False)
            await self._begin_again()
            verdict = await super().verify(proposal)
        return self._shown(verdict)

    async def next_commit(self, feed: NodeFeed) -> Verdict:
        """Do what a target client does; raises as `verify` does."""
        commit = await super().next_commit(feed)
        while not await self._is_accepted(commit):
            await self._drop_stream()
            await self._begin_again()
            commit = await super().next_commit(feed)
        return self._shown(commit)

    async def _is_accepted(self, verdict: Verdict) -> bool:
        """Return what the audit says of a verdict; who computed it is counted first, be it at other numerics."""
        if self._audit.is_moved:
            await self._check_worker()
        return await self._audit.accepts(verdict, self.targets, self._token_work_s)

    def _shown(self, verdict: Verdict) -> Verdict:
        """Return the verdict as the request asked for it."""
        return verdict if self._audit.shows_log_probs else replace(verdict, log_probs=())

    async def _begin_again(self) -> None:
        """Go on at another target, which holds nothing of the text."""
        self.contract.num_held = 0
        await self._check_worker()
