"""One client of LMTP, whatever carries its frames: its streams run side by side, each in order. Knows no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import TokenLogProb
from specsplit.gateway.errors import api_error
from specsplit.gateway.lmtp import messages
from specsplit.gateway.lmtp.messages import Generate, ModelInfo, Score, Stream
from specsplit.gateway.models import ModelTable
from specsplit.orchestrator.request import Request

MAX_STREAMS = 1000
"""Streams of one client that may be open at once."""
Send = Callable[[str], Awaitable[None]]


class LmtpSession:
    """Answers the frames of one client through `send`, which may wait until the client has taken them."""

    def __init__(self, models: ModelTable, send: Send, caller: str = "") -> None:
        self._models, self._send, self._caller = models, send, caller
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._sending = asyncio.Lock()

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    async def handle(self, frame: str) -> None:
        """Begin what a frame asks for. What is wrong with it is answered, and never raised."""
        try:
            command, fields = messages.split_frame(frame)
        except InvalidRequest as error:
            await self._answer("MSG", {"error": str(error)})
            return
        stream_id = fields.get("stream_id")
        if type(stream_id) is not int:
            await self._answer("MSG", {"error": f"{command} needs a whole number as stream_id."})
            return
        if command == "MODEL_INFO":
            await self._tell(fields, stream_id)
            return
        try:
            asked = messages.parse(command, fields)
            self._check_room(stream_id)
        except InvalidRequest as error:
            await self._answer("TOKEN", messages.error_item(stream_id, str(error)))
            return
        task = asyncio.create_task(self._run(asked))
        self._streams[stream_id] = task
        task.add_done_callback(lambda _: self._streams.pop(stream_id, None))

    async def wait(self) -> None:
        """Wait until all streams have ended."""
        while self._streams:
            await asyncio.wait(self._streams.values())

    async def close(self, reason: str | None = None) -> None:
        """End all streams; with a reason each ends with an error that says it."""
        open_streams = dict(self._streams)
        for task in open_streams.values():
            task.cancel()
        await asyncio.gather(*open_streams.values(), return_exceptions=True)
        if reason is not None:
            for stream_id in open_streams:
                await self._answer("TOKEN", messages.error_item(stream_id, reason))

    def _check_room(self, stream_id: int) -> None:
        if stream_id in self._streams:
            raise InvalidRequest(f"Stream {stream_id} is open already; choose another stream_id.")
        if len(self._streams) >= MAX_STREAMS:
            raise InvalidRequest(f"{MAX_STREAMS} streams are open already; wait until one has ended.")

    async def _tell(self, fields: dict[str, object], stream_id: int) -> None:
        try:
            asked = messages.parse("MODEL_INFO", fields)
            assert isinstance(asked, ModelInfo), "parsed as such"
            model = self._models.find(asked.model)
        except Exception as error:  # noqa: BLE001 - the reader is told, whatever it is
            await self._answer("MSG", messages.error_item(stream_id, api_error(error).message))
        else:
            await self._answer("MSG", messages.info_item(stream_id, model.name, model.identity))

    async def _run(self, asked: Stream) -> None:
        """Run one stream to its end; an error is its last item."""
        try:
            if isinstance(asked, Generate):
                await self._generate(asked)
            elif isinstance(asked, Score):
                await self._score(asked)
        except Exception as error:  # noqa: BLE001 - the reader is told, and the other streams go on
            await self._answer("TOKEN", messages.error_item(asked.stream_id, api_error(error).message))

    async def _generate(self, asked: Generate) -> None:
        model = self._models.find(asked.model)
        count = 1 if asked.top_logprobs is None else asked.top_logprobs
        request = Request(
            prompt_ids=tuple(asked.prompt),
            max_new_tokens=asked.max_tokens,
            sampling=asked.sampling(model.identity.vocab_size),
            seed=asked.seed,
            ignore_eos=asked.ignore_eos,
            logprobs=count,
            caller=self._caller,
        )
        async with aclosing(model.orchestrator(None).stream(request)) as chunks:
            async for chunk in chunks:
                last = len(chunk.token_ids) - 1
                items: list[messages.Item] = []
                for index, (token, found) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
                    item = messages.token_item(
                        asked.stream_id, token, found, chunk.finish_reason if index == last else None
                    )
                    items.append({**item, "top_logprobs": messages.top_logprobs(token, found)})
                if items:
                    await self._answer("TOKEN", *items)

    async def _score(self, asked: Score) -> None:
        model = self._models.find(asked.model)
        prompt, scored = asked.prompt, asked.scored
        values: list[TokenLogProb] = []
        if not prompt:  # nothing is known of a first token
            prompt, scored, values = scored[:1], scored[1:], [TokenLogProb(0.0)]
        if scored:
            biases = tuple((asked.logit_bias or {}).items())
            values += (await model.orchestrator(None).score(prompt, scored, biases)).tokens
        last = len(values) - 1
        await self._answer(
            "TOKEN",
            *(
                messages.token_item(asked.stream_id, token, found, "stop" if index == last else None)
                for index, (token, found) in enumerate(zip(asked.scored, values, strict=True))
            ),
        )

    async def _answer(self, kind: str, *items: messages.Item) -> None:
        # One frame at a time: a reader that has stopped holds up its own streams and nobody else's.
        async with self._sending:
            await self._send(messages.frame(kind, items))
