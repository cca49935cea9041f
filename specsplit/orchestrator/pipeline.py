"""One request through a draft and a target: opens the session, runs rounds until stop says so, closes it again.

Knows ports and records only, no model and no wire; everything on the route of a token between prompt and text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from specsplit.core.ports import Clock, Drafter, Tokenizer, Verifier
from specsplit.orchestrator.records import Chunk, Request, Result, Speculation


class Orchestrator:
    """Generates text: the target's words, at the draft's pace where there is one."""

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        speculation: Speculation = Speculation(),
        clock: Clock | None = None,
    ) -> None: ...

    async def connect(self) -> None: ...

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]: ...

    async def generate(self, request: Request) -> Result: ...
