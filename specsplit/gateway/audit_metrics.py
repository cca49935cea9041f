"""Counters of audited rounds for Prometheus, read at each scrape from the replicas of every model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specsplit.gateway.models import ModelTable
from specsplit.orchestrator.audit_counts import AuditCounts
from specsplit.orchestrator.replicas import Replicas
from specsplit.telemetry.prometheus import PREFIX

_COUNTERS: tuple[tuple[str, str, Callable[[AuditCounts], int]], ...] = (
    ("audited_rounds", "Rounds that another target recomputed before they were shown.", lambda c: c.num_rounds),
    ("audited_tokens", "Tokens that another target recomputed.", lambda c: c.num_tokens),
    ("audit_forwards", "Forwards of the targets that recomputed them.", lambda c: c.num_forwards),
    ("audit_ties", "Recomputed tokens that differed as near ties may.", lambda c: c.num_ties),
    ("audits_missed", "Rounds drawn for an audit that nobody had room for.", lambda c: c.num_missed),
)


class AuditMetrics(Collector):
    """The audits of all models whose rounds are audited; without one there is nothing on the page."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Return the counters at this moment."""
        audited = [
            (model.name, model.verifier)
            for model in self._models.served
            if isinstance(model.verifier, Replicas) and model.verifier.auditing.rate
        ]
        # A page without audits is what it was before there were any.
        if not audited:
            return []
        metrics: list[Metric] = []
        for name, meaning, value in _COUNTERS:
            family = CounterMetricFamily(PREFIX + name, meaning, labels=("model_name",))
            for model, replicas in audited:
                family.add_metric((model,), value(replicas.audits))
            metrics.append(family)
        labels = ("model_name", "target")
        wrong = CounterMetricFamily(PREFIX + "audit_mismatches", "Audits that found a target wrong.", labels=labels)
        quarantined = GaugeMetricFamily(PREFIX + "quarantined", "Whether a target is used no more.", labels=labels)
        for model, replicas in audited:
            for member in replicas.members:
                wrong.add_metric((model, member.name), member.num_mismatches)
                quarantined.add_metric((model, member.name), float(member.is_quarantined))
        return [*metrics, wrong, quarantined]
