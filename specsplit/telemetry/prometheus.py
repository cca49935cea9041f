"""A worker's statistics as Prometheus reads them, in vLLM's names behind our prefix. Knows no sockets.

Whoever counts is asked at each scrape, so that a page and `specsplit top` show the same numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specsplit.telemetry.statistics import StatisticsRole, WorkerStatistics

PREFIX, _VLLM_PREFIX = "specsplit:", "vllm:"
VLLM_NAMES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    }
)
"""Metrics that vLLM has too, without prefix and without the _total of counters."""
_Value = tuple[str, str, Callable[[WorkerStatistics], float]]
"""A metric's name, its meaning, and where its value comes from."""


def _kv_cache_share(statistics: WorkerStatistics) -> float:
    """Return the share of the KV cache in use, of its slots or of its bytes: whichever is full first lets nobody in."""
    slots, whole = (statistics.num_slots_used, statistics.num_slots), (statistics.used_bytes, statistics.budget_bytes)
    # A stage cannot tell its warm slots, which new sessions may take, from those of open sessions.
    shares = (slots, whole) if statistics.layers is None else (whole,)
    return max(used / there if there else 0.0 for used, there in shares)


_GAUGES: tuple[_Value, ...] = (
    ("num_requests_running", "Sessions that are open.", lambda s: s.num_sessions),
    ("num_requests_waiting", "Openings that wait for a slot.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV cache in use, of its slots or of its bytes: the larger one; of a stage, of its bytes.",
        _kv_cache_share,
    ),
    ("kv_cache_used_bytes", "Bytes of the KV cache in use; 0 if unknown.", lambda s: s.used_bytes),
    ("kv_cache_budget_bytes", "Bytes that the KV cache may use; 0 if unknown.", lambda s: s.budget_bytes),
    ("num_slots", "KV slots.", lambda s: s.num_slots),
    (
        "num_slots_used",
        "KV slots in use; of a stage, those that hold rows, also of ended sessions.",
        lambda s: s.num_slots_used,
    ),
    (
        "num_slots_warm",
        "KV slots with rows of ended sessions, for new ones that begin alike.",
        lambda s: s.num_slots_warm,
    ),
    ("num_tasks_running", "Pieces of work under way.", lambda s: s.num_running),
)
_NOT_OF_STAGES = frozenset({"num_requests_running", "num_slots_warm"})
"""Gauges of what only a chain's coordinator knows."""
_COUNTERS: tuple[_Value, ...] = (
    ("requests_refused", "Openings that were refused.", lambda s: s.num_refused),
    ("num_preemptions", "Sessions that lost their rows to older ones.", lambda s: s.num_preempted),
    ("prefix_cache_hits", "Tokens whose rows a new session found.", lambda s: s.num_reused_tokens),
    ("steps", "Forwards.", lambda s: s.steps.num_steps),
    ("step_seconds", "Seconds with a forward under way.", lambda s: s.steps.busy_s),
    ("step_tokens", "Tokens that were forwarded.", lambda s: s.steps.num_rows),
    ("step_sequences", "Sessions in these forwards, each forward's counted anew.", lambda s: s.steps.num_sequences),
)
_ROLE_COUNTERS: dict[StatisticsRole, tuple[_Value, ...]] = {
    "draft": (("spec_decode_num_draft_tokens", "Tree nodes that were offered.", lambda s: s.trees.num_nodes),),
    "target": (
        ("generation_tokens", "Tokens committed by verdicts.", lambda s: s.trees.num_tokens),
        ("spec_decode_num_drafts", "Verdicts on a tree.", lambda s: s.trees.num_tree_rounds),
        ("spec_decode_num_draft_tokens", "Tree nodes that were verified.", lambda s: s.trees.num_nodes),
        ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", lambda s: s.trees.num_accepted),
    ),
    "stage": (),
}


class Worker(Protocol):
    """Whoever counts: the service of a draft, a target or a stage."""

    @property
    def role(self) -> StatisticsRole: ...

    def statistics(self) -> WorkerStatistics:
        """Return what it holds now, and its counts."""
        ...


class WorkerMetrics(Collector):
    """The page of the workers of one process; they are asked for their statistics at every scrape."""

    def __init__(self, workers: Sequence[Worker], *, has_vllm_names: bool = False) -> None:
        self._workers, self._has_vllm_names = workers, has_vllm_names
        self._registry = CollectorRegistry()
        add_process_metrics(self._registry)
        self._registry.register(self)

    def page(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return page_of(self._registry, has_vllm_names=self._has_vllm_names)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics at this moment; of several workers each sample names its role."""
        families: dict[str, Metric] = {}
        for worker in self._workers:
            for metric in _metrics(worker.role, worker.statistics()):
                family = families.setdefault(metric.name, metric)
                if len(self._workers) > 1:
                    labelled = [each._replace(labels={**each.labels, "role": worker.role}) for each in metric.samples]
                    family.samples = labelled if family is metric else [*family.samples, *labelled]
        return families.values()


def _metrics(role: StatisticsRole, statistics: WorkerStatistics) -> Iterator[Metric]:
    """Yield the metrics of one worker."""
    labels = {"model_name": statistics.model}
    yield _build(role, statistics)
    for name, meaning, value in _GAUGES:
        if role != "stage" or name not in _NOT_OF_STAGES:
            yield _sampled(GaugeMetricFamily(PREFIX + name, meaning), labels, value(statistics))
    for name, meaning, value in (*_COUNTERS, *_ROLE_COUNTERS[role]):
        yield _sampled(CounterMetricFamily(PREFIX + name, meaning), labels, value(statistics))
    yield from _labelled(statistics)


def _build(role: StatisticsRole, statistics: WorkerStatistics) -> Metric:
    start, end = statistics.layers or (0, 0)
    labels = {"role": role, "version": version("specsplit"), "model_name": statistics.model}
    if end:
        labels["layers"] = f"{start}:{end}"
    return _sampled(GaugeMetricFamily(PREFIX + "build_info", "What runs here; always 1."), labels, 1.0)


def _labelled(statistics: WorkerStatistics) -> Iterator[Metric]:
    """Yield the metrics with further labels: of callers' limits, of a cut target, and of stages."""
    model = {"model_name": statistics.model}
    if statistics.num_over_limit:
        limited = CounterMetricFamily(PREFIX + "requests_over_limit", "Requests refused at a limit of their caller.")
        for limit, count in statistics.num_over_limit.items():
            _sampled(limited, {**model, "limit": limit}, count)
        yield limited
    if statistics.num_resyncs:
        resyncs = CounterMetricFamily(PREFIX + "resync", "Packets after which rows were sent again, by the reason.")
        for reason, count in statistics.num_resyncs.items():
            _sampled(resyncs, {**model, "reason": reason}, count)
        yield resyncs
    if statistics.link_bytes:
        carried = CounterMetricFamily(PREFIX + "wire_bytes", "Bytes of packets, by link and direction seen from here.")
        for (link, direction), count in statistics.link_bytes.items():
            _sampled(carried, {**model, "link": link, "direction": direction}, count)
        yield carried


def _sampled(family: Metric, labels: dict[str, str], value: float) -> Metric:
    suffix = "_total" if family.type == "counter" else ""
    family.add_sample(family.name + suffix, labels, value)
    return family


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Have a registry tell of its process, too: memory, CPU seconds, descriptors, and tasks of its event loop."""
    ProcessCollector(registry=registry)
    registry.register(_EventLoopTasks())


class _EventLoopTasks(Collector):
    """Counts the tasks of the loop that answers the scrape; one more each day is a leak."""

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(PREFIX + "event_loop_tasks", "Tasks of the event loop.", len(asyncio.all_tasks()))


def page_of(registry: CollectorRegistry, *, has_vllm_names: bool) -> bytes:
    """Return a registry in Prometheus's text format; what vLLM has, too, also in its names if `has_vllm_names`."""
    return generate_latest(_Page(registry, has_vllm_names=has_vllm_names))


class _Page(Collector):
    """The metrics of a registry as a page shows them: without the times at which their values were made.

    Prometheus's library has a switch for these, but for all registries of the process.
    """

    def __init__(self, registry: CollectorRegistry, *, has_vllm_names: bool) -> None:
        self._registry, self._has_vllm_names = registry, has_vllm_names

    def collect(self) -> Iterable[Metric]:
        families = list(self._registry.collect())
        for family in families:
            family.samples = [sample for sample in family.samples if sample.name != f"{family.name}_created"]
        return [*families, *filter(None, map(_in_vllm_names, families))] if self._has_vllm_names else families


def _in_vllm_names(family: Metric) -> Metric | None:
    """Return the same metric in vLLM's name; None if vLLM has none of that name."""
    if family.name.removeprefix(PREFIX) not in VLLM_NAMES:
        return None
    renamed = Metric(family.name.replace(PREFIX, _VLLM_PREFIX, 1), family.documentation, family.type)
    # A draft beside its target has no requests or tokens of its own to be added to the target's.
    samples = [sample for sample in family.samples if sample.labels.get("role") != "draft"]
    renamed.samples = [sample._replace(name=sample.name.replace(PREFIX, _VLLM_PREFIX, 1)) for sample in samples]
    return renamed
