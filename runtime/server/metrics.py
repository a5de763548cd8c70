"""What Prometheus scrapes: the engine's own counts, named as vLLM names them with ``k3`` in front.

Nothing is counted twice: a scrape reads one snapshot of the engine. Each server has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..stats import EngineStats, HistogramData
from .service import Service

GAUGES = {  # name -> (help, value of a snapshot)
    "num_requests_running": ("Requests in the running batch", lambda s: s.running),
    "num_requests_waiting": ("Requests in the queue", lambda s: s.waiting),
    "kv_cache_usage_perc": ("Latent pages in use, 0 to 1", lambda s: s.pages_used / max(1, s.pages_total)),
    "state_slot_usage_perc": ("State slots in use, 0 to 1", lambda s: s.slots_used / max(1, s.slots_total)),
    "current_step_seconds": ("How long the running step has taken", lambda s: s.current_step_s),
}
COUNTERS = {
    "prompt_tokens": ("Prompt tokens taken in", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated", lambda s: s.output_tokens),
    "num_preemptions": ("Requests that gave up their place", lambda s: s.preemptions),
    "engine_steps": ("Forward passes", lambda s: s.steps),
    "engine_rows": ("Token rows run through the model", lambda s: s.rows),
    "engine_failed_steps": ("Forward passes that raised", lambda s: s.failed_steps),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token", lambda s: s.time_to_first_token),
    "inter_token_latency_seconds": ("Token to next token", lambda s: s.time_between_tokens),
    "e2e_request_latency_seconds": ("Arrival to end", lambda s: s.time_of_request),
}


class EngineCollector(Collector):
    """Turns a snapshot of the engine into metrics."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        stats = self._service.engine.stats()
        label = [self._service.config.model_name]
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(f"k3:{name}", text, labels=["model_name"])
            gauge.add_metric(label, value(stats))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(f"k3:{name}", text, labels=["model_name"])
            counter.add_metric(label, value(stats))
            yield counter
        yield finished(stats, label)
        for name, (text, value) in HISTOGRAMS.items():
            yield histogram(f"k3:{name}", text, label, value(stats))


def finished(stats: EngineStats, label: list[str]) -> Metric:
    counter = CounterMetricFamily(
        "k3:request_success", "Requests by how they ended", labels=["model_name", "finished_reason"]
    )
    for reason in ("stop", "length", "abort", "error"):
        counter.add_metric([*label, reason], stats.finished.get(reason, 0))
    return counter


def histogram(name: str, text: str, label: list[str], data: HistogramData) -> Metric:
    """Prometheus wants running sums where we keep counts."""
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    buckets, total = [], 0
    for bound, count in zip([*map(str, data.bounds), "+Inf"], data.counts):
        total += count
        buckets.append((bound, total))
    family.add_metric(label, buckets, data.sum)
    return family


class Metrics:
    """The registry of one server: the engine's numbers, and responses by path and status."""

    def __init__(self, service: Service):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(service))
        self.responses = Counter(
            "k3:http_responses", "Responses by path and status", ["path", "status"], registry=self._registry
        )

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
