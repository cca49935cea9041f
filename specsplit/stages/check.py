"""Compares a chain with one process: a known packet goes down the chain, boundary by boundary.

For every boundary the stages up to it are configured as a chain of their own, whose last one answers with the hidden
states that it would send on. So all that is compared has come out of the service, over its links.

Legend: T rows of the packet, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from specsplit.core.errors import DeadlineExceeded, InvalidSettings
from specsplit.core.sections import TargetSettings
from specsplit.engine import event_loop
from specsplit.stages.loading import Coordinator, load_coordinator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specsplit.model.attention.metadata import SequenceInput
    from specsplit.stages.packet import HeadRequest, Packet
    from specsplit.stages.wire.connection import Connection
    from specsplit.stages.wire.peer import StagePeer

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}
"""Largest deviation of hidden states by dtype, relative to the largest of them if that exceeds 1."""
_NUM_CHAIN = 16
_TREE = (15, 15, 15, 16, 16, 17, 19, 21)
"""Parents of the rows behind the chain: a tree, since masks and positions differ there."""
_REPEATS = 3
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class StageCheck:
    """The result at the boundary behind one stage."""

    stage: int
    address: str
    layers: str
    max_deviation: float
    """Deviation of hidden states; behind a head, of the log-probabilities of the picks."""
    num_other_picks: int | None
    """Rows whose pick differs; None where there are no picks."""
    time_ms: float
    """From the coordinator down to this stage and back, the best of several."""
    is_equal: bool


def check_stages(settings: TargetSettings) -> list[StageCheck]:
    """Compare the output of every stage with the model in this process, which is loaded for it.

    Raises:
        InvalidSettings: no stages are named, or the first layers are the target's own.
        PeerMismatch: the stages do not fit, or serve a coordinator; LinkError: one cannot be reached.
        ModelError, ResourceError: the model cannot be loaded here.
    """
    if not settings.stages:
        raise InvalidSettings("Name the stages to check, in the order of their layers: --stages HOST:PORT,HOST:PORT.")
    if settings.layers is not None:
        raise InvalidSettings(
            f"Only stages are checked, and layers {settings.layers} are the target's own by its settings (layers); for "
            f"the check start a `specsplit stage --layers {settings.layers}`, name it first, and leave the setting out."
        )
    from specsplit.rpc.credentials import open_security
    from specsplit.stages.wire.peer import StagePeer

    security = open_security(settings, "target")
    peers = [StagePeer(address, security) for address in settings.stages]
    coordinator = load_coordinator(settings.model_copy(update={"local_stages": None, "sessions": 1}))
    entry = _known_entry(coordinator)
    truth = _compute(settings, coordinator, entry)
    # This process computes too, so the stages are held to its dtype also where a target would leave it to them.
    expected = replace(coordinator.expected, hidden_dtype=truth.dtype_name)
    coordinator = replace(coordinator, expected=expected)
    return event_loop.run(_check(peers, coordinator, entry, truth))


@dataclass(frozen=True, slots=True)
class _Truth:
    """The same rows in one process: `hidden` [T, H] behind every layer, and the logits [T, V]."""

    hidden: list[Tensor]
    logits: Tensor
    dtype: torch.dtype
    """The number format of hidden states before they were written down in fp32."""

    @property
    def dtype_name(self) -> str:
        from specsplit.model.loader import dtype_name

        return dtype_name(self.dtype)

    @property
    def picks(self) -> list[int]:
        return [int(row) for row in self.logits.argmax(-1)]


def _known_entry(coordinator: Coordinator) -> SequenceInput:
    from specsplit.model.attention.metadata import SequenceInput

    # Rows [0, 16) are a chain, the others a tree behind it; token ids only have to differ from row to row.
    num_rows = min(coordinator.model.context, _NUM_CHAIN + len(_TREE))
    parents = [*range(-1, _NUM_CHAIN - 1), *_TREE][:num_rows]
    token_ids = [(7919 * row + 11) % coordinator.model.vocab_size for row in range(num_rows)]
    return SequenceInput(0, 0, token_ids, parents, num_logits=num_rows)


def _compute(settings: TargetSettings, coordinator: Coordinator, entry: SequenceInput) -> _Truth:
    from specsplit.model.files import load_config
    from specsplit.model.loader import load_model
    from specsplit.model.source import resolve
    from specsplit.stages.shard.outline import find_outline

    model = load_model(
        settings.model,
        role="target",
        dtype=coordinator.expected.dtype,
        device=settings.device,
        threads=settings.threads,
        context=coordinator.model.context,
        record=False,
    )
    path, name = resolve(settings.model, "target")
    layers: Any = model.runner.model.get_submodule(find_outline(path, name, load_config(path, name)).layers)
    hidden: list[Tensor] = []

    # Some layers return tuples; the hidden states come first.
    def note(layer: Any, args: Any, output: Any) -> None:
        rows: Any = cast("tuple[Any, ...]", output)[0] if isinstance(output, tuple) else output
        hidden.append(rows.detach()[0, : len(entry.token_ids)].float().cpu())  # a GPU fills its steps up

    for layer in layers:
        layer.register_forward_hook(note)
    logits = model.runner.forward([entry])[0]
    return _Truth(hidden, logits.cpu(), model.runner.dtype)


async def _check(
    peers: Sequence[StagePeer], coordinator: Coordinator, entry: SequenceInput, truth: _Truth
) -> list[StageCheck]:
    from specsplit.stages.wire.connection import Connection
    from specsplit.stages.wire.frames import ChainId

    name, secret, checks = secrets.token_hex(8), secrets.token_bytes(32), list[StageCheck]()
    try:
        for peer in peers:
            peer.admit(await peer.ping())
        found = [(peer.address, peer.identity) for peer in peers if peer.identity is not None]
        await asyncio.to_thread(coordinator.expected.check_chain, found)
        # Numbers rise from chain to chain, as a stage obeys only a newer configuration of its coordinator.
        for index in range(len(peers)):
            chain = Connection(ChainId(name, index + 1, secret), peers[: index + 1], lambda peer: None)
            try:
                await chain.open(keep_slots=False, takeover=False)
                checks.append(await _Boundary(coordinator, entry, truth, peers[index]).check(index, chain))
            finally:
                await chain.aclose(in_order=True)
    finally:
        for peer in peers:
            await peer.aclose()
    return checks


class _Boundary:
    """Asks one stage for its output, and compares it."""

    def __init__(self, coordinator: Coordinator, entry: SequenceInput, truth: _Truth, peer: StagePeer) -> None:
        from specsplit.stages.chain.remote_kv import RemoteKV

        assert peer.identity is not None, "a chain is checked before its boundaries"
        self._coordinator, self._entry, self._truth = coordinator, entry, truth
        self._address, self._stage = peer.address, peer.identity
        self._slot = RemoteKV(1, coordinator.model.context).slots[0]
        self._request_ids = iter(range(1, 100))

    async def check(self, index: int, chain: Connection) -> StageCheck:
        from specsplit.core.types import SessionParams
        from specsplit.stages.packet import HeadRequest

        time_ms, answer = float("inf"), None
        head_request = HeadRequest(SessionParams()) if self._stage.has_head else None
        # The first answer may include warming up, so the best of several is the time.
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            answer = await self._answer(chain, head_request)
            time_ms = min(time_ms, (time.perf_counter() - start_s) * 1e3)
        assert answer is not None
        num_other = self._num_other_picks(answer)
        if self._stage.has_head:
            answer = await self._answer(chain, HeadRequest(SessionParams(), tuple(self._truth.picks)))
        deviation = self._deviation(answer)
        is_equal = not num_other and deviation <= TOLERANCES[self._truth.dtype_name]
        return StageCheck(index, self._address, self._stage.layers, deviation, num_other, time_ms, is_equal)

    async def _answer(self, chain: Connection, head_request: HeadRequest | None) -> Packet:
        from specsplit.stages.packet import check_answer

        packet = self._packet(head_request)
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await chain.begin(packet)
        except TimeoutError:
            raise DeadlineExceeded(f"The stage at {self._address} gave no answer within {_ANSWER_S:g} s.") from None
        finally:
            chain.forget(packet.request_id)
        check_answer(answer, packet)
        return answer

    def _packet(self, head_request: HeadRequest | None) -> Packet:
        from specsplit.model.attention.metadata import SequenceInput
        from specsplit.stages.chain.step_slice import Chunk, StepSlice
        from specsplit.stages.packet import COORDINATOR, Packet, StepKind
        from specsplit.stages.shard.payload import payload_type

        entry, ends, model = self._entry, self._coordinator.ends, self._coordinator.model
        asking = SequenceInput(0, 0, entry.token_ids, entry.parents, entry.num_logits, head_request)
        chunk = Chunk(0, len(entry.token_ids), is_last=True)
        session = StepSlice(asking, self._slot).packet_session(chunk, None, has_ids=ends is None)
        return Packet(
            request_id=next(self._request_ids),
            step_kind=StepKind.VERIFY,
            hidden_size=model.hidden_size,
            dtype=payload_type(self._truth.dtype),
            stage_from=COORDINATOR,
            stage_to=0,
            sessions=(replace(session, num_logits=entry.num_logits),),
            payload=ends.enter([entry]) if ends is not None else b"",
        )

    def _num_other_picks(self, answer: Packet) -> int | None:
        """Return in how many rows the pick differs: the stage's, or what this process makes of its hidden states."""
        ends = self._coordinator.ends
        if self._stage.has_head:
            picks = list(answer.sessions[0].picks)
        elif ends is not None and self._stage.end == self._stage.num_layers:
            picks = [int(row) for row in ends.logits(answer, [self._entry])[0].argmax(-1)]
        else:
            return None
        return sum(ours != other for ours, other in zip(self._truth.picks, picks, strict=True))

    def _deviation(self, answer: Packet) -> float:
        import torch

        from specsplit.stages.shard.payload import from_payload

        if self._stage.has_head:
            log_probs = torch.log_softmax(self._truth.logits.float(), -1)
            expected = log_probs.gather(-1, torch.tensor(self._truth.picks)[:, None])[:, 0].double()
            found = torch.tensor([token.log_prob for token in answer.sessions[0].log_probs], dtype=torch.float64)
        else:
            expected = self._truth.hidden[self._stage.end - 1]
            found = from_payload(answer.payload, self._truth.dtype, answer.num_rows, answer.hidden_size).float()
        return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
