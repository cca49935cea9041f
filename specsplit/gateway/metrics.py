"""Counters for Prometheus: process, requests, tokens, rounds and speculation, in vLLM's names after our prefix."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from specsplit.core.types import FinishReason
from specsplit.orchestrator.request import Chunk, Result, RoundFacts
from specsplit.telemetry.prometheus import PREFIX, add_process_metrics, page_of

M = TypeVar("M", Counter, Gauge, Histogram)
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_ROUND_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_E2E_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_ABORT = "abort"
"""The finished reason of answers whose client left; vLLM's word."""
_PHASES = ("verify", "target_device", "draft_device")


class _Children(dict[str | tuple[str, ...], M]):
    """The values of one instrument by label, or by labels.

    Prometheus's own look-up checks the labels and takes a lock, several times a token.
    """

    def __init__(self, instrument: M) -> None:
        super().__init__()
        self._instrument = instrument

    def __missing__(self, labels: str | tuple[str, ...]) -> M:
        child = self[labels] = self._instrument.labels(*((labels,) if isinstance(labels, str) else labels))
        return child

    def show(self, labels: str | tuple[str, ...]) -> None:
        """Have the value there, whatever it is."""
        _ = self[labels]


class _Instruments:
    """Makes the instruments of one registry, each with a value for every model but for plain ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.of_models: list[_Children[Any]] = []
        """Those with no label but the model."""

    def counter(self, name: str, text: str, *labels: str) -> _Children[Counter]:
        return self._kept(Counter(PREFIX + name, text, ("model_name", *labels), registry=self._registry), labels)

    def plain_counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> _Children[Histogram]:
        names = ("model_name", *labels)
        return self._kept(Histogram(PREFIX + name, text, names, buckets=buckets, registry=self._registry), labels)

    def gauge(self, name: str, text: str) -> _Children[Gauge]:
        return self._kept(Gauge(PREFIX + name, text, ("model_name",), registry=self._registry), ())

    def _kept(self, instrument: M, labels: tuple[str, ...]) -> _Children[M]:
        children = _Children(instrument)
        if not labels:
            self.of_models.append(children)
        return children


class _SpeculationMetrics:
    """The counters of rounds with a drafted token."""

    def __init__(self, make: _Instruments) -> None:
        self._drafts = make.counter("spec_decode_num_drafts", "Rounds with a drafted token.")
        self._draft_tokens = make.counter("spec_decode_num_draft_tokens", "Tokens drafted along the rounds' paths.")
        self._accepted = make.counter("spec_decode_num_accepted_tokens", "Drafted tokens that the target accepted.")
        name = "spec_decode_num_accepted_tokens_per_pos"
        self._accepted_per_pos = make.counter(name, "The same by their place in the path.", "position")

    def add(self, facts: RoundFacts | None, model: str) -> None:
        """Count a round."""
        if facts is None or not facts.path_length:
            return
        self._drafts[model].inc()
        self._draft_tokens[model].inc(facts.path_length)
        self._accepted[model].inc(facts.num_accepted)
        for position in range(facts.num_accepted):
            self._accepted_per_pos[model, str(position)].inc()


class _RoundMetrics:
    """The times of rounds, and what an answer's end tells about all of its rounds."""

    def __init__(self, make: _Instruments) -> None:
        self._seconds = make.histogram(
            "round_seconds",
            "Of a round: verify is the wait for the verdict, the device times are those of its forwards.",
            _ROUND_S,
            "phase",
        )
        self.fallback = make.gauge(
            "fallback_active", "Answers whose last round went without a worker, or waited for it."
        )
        self._kept = make.counter("ahead_kept", "Rounds drafted ahead whose outcome was in the tree.")
        self._dropped = make.counter("ahead_dropped", "Rounds drafted ahead whose outcome was not.")
        self._bytes = make.counter("wire_bytes", "Bytes of ended answers' rounds.", "link", "direction")
        self._resyncs = make.counter("resync", "Times that a worker was sent again what it had lost.", "link", "reason")

    def show(self, model: str) -> None:
        """Have the values of a model there whose labels are known."""
        for phase in _PHASES:
            self._seconds.show((model, phase))
        for link, direction in product(("draft", "target"), ("sent", "received")):
            self._bytes.show((model, link, direction))

    def add(self, facts: RoundFacts | None, model: str) -> None:
        """Count a round."""
        if facts is None or not facts.number:
            return
        self._seconds[model, "verify"].observe(facts.verify_s)
        self._seconds[model, "target_device"].observe(facts.verdict.timings.device_ms / 1e3)
        if facts.tree.timings.num_forwards:
            self._seconds[model, "draft_device"].observe(facts.tree.timings.device_ms / 1e3)

    def end(self, result: Result, model: str) -> None:
        """Count what is known at the end of an answer."""
        ahead = result.speculative_decoding
        self._kept[model].inc(ahead.num_kept_rounds)
        self._dropped[model].inc(ahead.num_ahead_rounds - ahead.num_kept_rounds)
        for link, traffic in (
            () if result.wire is None else (("draft", result.wire.draft), ("target", result.wire.target))
        ):
            self._bytes[model, link, "sent"].inc(traffic.sent_bytes)
            self._bytes[model, link, "received"].inc(traffic.received_bytes)
        for replay in result.resyncs:
            self._resyncs[model, replay.worker, replay.reason].inc()


class _EndMetrics:
    """The counters of how answers and requests ended."""

    def __init__(self, make: _Instruments) -> None:
        self.success = make.counter(
            "request_success", "Answers by their end; abort: the client left.", "finished_reason"
        )
        self.failed = make.counter("request_failed", "Answers that ended with an error.")
        self.cut = make.plain_counter("clients_not_reading", "Clients cut off since they did not read their answer.")


class Metrics:
    """The counters of one gateway; with `has_vllm_names` its page has vLLM's names beside ours.

    `others` adds metrics that somebody else counts. The counters of `models` are there from zero on: one that appears
    with its first count has no rate until the second.
    """

    def __init__(
        self, others: Collector | None = None, models: Iterable[str] = (), *, has_vllm_names: bool = False
    ) -> None:
        registry = CollectorRegistry()
        if others is not None:
            registry.register(others)
        self._page = partial(page_of, registry, has_vllm_names=has_vllm_names)
        add_process_metrics(registry)
        make = _Instruments(registry)
        self.waiting = make.gauge("num_requests_waiting", "Answers without a token yet.")
        self.running = make.gauge("num_requests_running", "Answers under way, with a token at least.")
        self.prompt_tokens = make.counter("prompt_tokens", "Tokens of prompts whose answers have begun.")
        self.generation_tokens = make.counter("generation_tokens", "Tokens generated.")
        self.ends = _EndMetrics(make)
        over_limit = PREFIX + "requests_over_limit"
        self.over_limit = Counter(over_limit, "Requests refused at a limit of a key.", ("limit",), registry=registry)
        self.ttft = make.histogram(
            "time_to_first_token_seconds", "From a request to the first token of its answers.", _TTFT_S
        )
        self.itl = make.histogram(
            "inter_token_latency_seconds", "Between tokens, a round's time shared evenly.", _ITL_S
        )
        self.e2e = make.histogram("e2e_request_latency_seconds", "From a request to an answer's last token.", _E2E_S)
        self.speculation = _SpeculationMetrics(make)
        self.rounds = _RoundMetrics(make)
        for model in models:
            for children in make.of_models:
                children.show(model)
            self.rounds.show(model)
            for reason in (*get_args(FinishReason), _ABORT):
                self.ends.success.show((model, reason))

    def page(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return self._page()

    @contextmanager
    def following(self, model: str, nums_prompt_tokens: Sequence[int]) -> Generator[list[AnswerMetrics]]:
        """Count the answers to one request, for the length of the block.

        A client that leaves is no failure, but a finished reason, as in vLLM.
        """
        answers = list[AnswerMetrics]()
        answers += [AnswerMetrics(self, model, count, answers) for count in nums_prompt_tokens]
        self.waiting[model].inc(len(answers))
        unfinished = self.ends.failed[model]
        try:
            yield answers
        except (asyncio.CancelledError, GeneratorExit):
            unfinished = self.ends.success[model, _ABORT]
            raise
        finally:
            for answer in answers:
                (self.running if answer.num_tokens else self.waiting)[model].dec()
                answer.set_fallback(is_active=False)
            if left := [answer.num_tokens for answer in answers if not answer.is_finished]:
                # A request that was refused counts once, and not for each answer that it asked for.
                unfinished.inc(max(1, sum(map(bool, left))))


class AnswerMetrics:
    """One answer, from its request to its end; `siblings` are all answers to the request."""

    def __init__(self, metrics: Metrics, model: str, num_prompt_tokens: int, siblings: Sequence[AnswerMetrics]) -> None:
        self.num_tokens, self._num_prompt_tokens = 0, num_prompt_tokens
        self.is_finished = self._is_degraded = False
        self._metrics, self._model, self._siblings = metrics, model, siblings
        self._began_s = self._last_s = time.perf_counter()

    def add(self, chunk: Chunk) -> None:
        """Count a chunk."""
        metrics, model, now_s = self._metrics, self._model, time.perf_counter()
        count = len(chunk.token_ids)
        if not self.num_tokens:
            # Here, as in vLLM: the prompts of refused requests were not read.
            metrics.prompt_tokens[model].inc(self._num_prompt_tokens)
            metrics.waiting[model].dec()
            metrics.running[model].inc()
            # Later answers to a request wait for its first ones, which says nothing about the server.
            if not any(answer.num_tokens for answer in self._siblings):
                metrics.ttft[model].observe(now_s - self._began_s)
        else:
            itl, itl_s = metrics.itl[model], (now_s - self._last_s) / max(count, 1)
            for _ in range(count):
                itl.observe(itl_s)
        self.num_tokens, self._last_s = self.num_tokens + count, now_s
        metrics.generation_tokens[model].inc(count)
        metrics.speculation.add(chunk.facts, model)
        metrics.rounds.add(chunk.facts, model)
        self.set_fallback(is_active=chunk.degraded is not None)
        if chunk.result is not None:
            metrics.rounds.end(chunk.result, model)
        if chunk.finish_reason is not None:
            self.is_finished = True
            metrics.ends.success[model, chunk.finish_reason].inc()
            metrics.e2e[model].observe(now_s - self._began_s)

    def set_fallback(self, *, is_active: bool) -> None:
        """Tell whether the last round went without a worker."""
        if is_active != self._is_degraded:
            self._is_degraded = is_active
            self._metrics.rounds.fallback[self._model].inc(1 if is_active else -1)
