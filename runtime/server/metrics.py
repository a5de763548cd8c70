"""What Prometheus scrapes: the engine's own counts, named as vLLM names them with ``k3`` in front.

Nothing is counted twice: a scrape reads one snapshot of the engine. Each server has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..stats import HistogramData
from .service import Service

if TYPE_CHECKING:
    from ..cache.tiers.tally import OffloadStats

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
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_query_tokens),
    "prefix_cache_hits": ("Prompt tokens found there and not run", lambda s: s.prefix_hit_tokens),
    "spec_decode_num_drafts": (
        "Rows of drafts verified",
        lambda s: sum(s.drafts_proposed[:1]),
    ),
    "spec_decode_num_draft_tokens": ("Drafts verified", lambda s: sum(s.drafts_proposed)),
    "spec_decode_num_accepted_tokens": ("Drafts accepted", lambda s: sum(s.drafts_accepted)),
}
LABELLED = {  # name -> (help, names of the labels, {values of the labels: value} of a snapshot)
    "request_success": (
        "Requests by how they ended",
        ("finished_reason",),
        lambda s: {(reason,): s.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")},
    ),
    "prefix_cache_evictions": (
        "What the prefix cache gave up for want of room",
        ("kind",),
        lambda s: {("pages",): s.evicted_pages, ("states",): s.evicted_states},
    ),
    "prefix_cache_declines": (
        "Prefixes that were not kept or not served, by reason",
        ("reason",),
        lambda s: keyed(s.prefix_declines),
    ),
    "spec_decode_num_accepted_tokens_per_pos": (
        "How often the draft at a position was accepted",
        ("position",),
        lambda s: {(str(place),): count for place, count in enumerate(s.drafts_accepted)},
    ),
}
OFFLOADED = {  # the same, of the tiers
    "kv_offload_stored": ("Entries written", ("tier",), lambda o: keyed(o.stored)),
    "kv_offload_loaded": ("Entries read", ("tier",), lambda o: keyed(o.loaded)),
    "kv_offload_loads": ("Prefixes asked for", ("outcome",), lambda o: keyed(o.loads)),
    "kv_offload_loaded_tokens": ("Tokens not run again", (), lambda o: {(): o.loaded_tokens}),
    "kv_offload_declines": (
        "Stores and loads that did not take place",
        ("what", "reason"),
        lambda o: (
            {("store", reason): count for reason, count in o.store_declined.items()}
            | {("load", reason): count for reason, count in o.load_declined.items()}
        ),
    ),
}
TIER_BYTES = {"host": lambda o: o.host_bytes, "disk": lambda o: o.disk_bytes}
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
        for name, (text, labels, values) in LABELLED.items():
            yield labelled(name, text, labels, label, values(stats))
        if stats.offload is not None:
            yield from offloaded(stats.offload, label)
        for name, (text, value) in HISTOGRAMS.items():
            yield histogram(f"k3:{name}", text, label, value(stats))


def labelled(
    name: str, text: str, labels: Sequence[str], label: list[str], values: Mapping[tuple[str, ...], int]
) -> Metric:
    """A counter with a value for each combination of labels."""
    counter = CounterMetricFamily(f"k3:{name}", text, labels=["model_name", *labels])
    for key, value in values.items():
        counter.add_metric([*label, *key], value)
    return counter


def offloaded(stats: OffloadStats, label: list[str]) -> Iterator[Metric]:
    """What the tiers below the pools did and hold."""
    for name, (text, labels, values) in OFFLOADED.items():
        yield labelled(name, text, labels, label, values(stats))
    gauge = GaugeMetricFamily("k3:kv_offload_bytes", "Bytes held", labels=["model_name", "tier"])
    for tier, value in TIER_BYTES.items():
        gauge.add_metric([*label, tier], value(stats))
    yield gauge


def keyed(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(name,): count for name, count in counts.items()}


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
