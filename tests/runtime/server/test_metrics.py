"""Metrics: valid exposition, the engine's numbers, nothing shared between two servers."""

from fake_engine import FakeEngine
from k3compile.runtime.cache.tiers.tally import OffloadStats
from prometheus_client.parser import text_string_to_metric_families
from serving import ask, make_app, says


def scrape(app):
    response = ask(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            samples[(sample.name, *labels)] = sample.value
    return samples


def test_the_engines_numbers_are_shown_under_vllms_names():
    samples = scrape(make_app(FakeEngine(says("x"), manual=True)))
    assert samples[("k3:num_requests_running",)] == 0
    assert samples[("k3:num_requests_waiting",)] == 0
    assert samples[("k3:kv_cache_usage_perc",)] == 0.25
    assert samples[("k3:prompt_tokens_total",)] == 50
    assert samples[("k3:generation_tokens_total",)] == 20
    assert samples[("k3:num_preemptions_total",)] == 1
    assert samples[("k3:request_success_total", ("finished_reason", "stop"))] == 3
    assert samples[("k3:request_success_total", ("finished_reason", "error"))] == 0


def test_what_caching_and_drafting_did_is_shown_under_vllms_names():
    engine = FakeEngine(says("x"), manual=True)
    engine.more_stats = {
        "prefix_query_tokens": 100,
        "prefix_hit_tokens": 64,
        "evicted_pages": 5,
        "evicted_states": 2,
        "prefix_declines": {"no slot": 3},
        "drafts_proposed": (10, 10, 8),
        "drafts_accepted": (9, 6, 2),
    }
    samples = scrape(make_app(engine))
    assert samples[("k3:prefix_cache_queries_total",)] == 100
    assert samples[("k3:prefix_cache_hits_total",)] == 64
    assert samples[("k3:prefix_cache_evictions_total", ("kind", "pages"))] == 5
    assert samples[("k3:prefix_cache_evictions_total", ("kind", "states"))] == 2
    assert samples[("k3:prefix_cache_declines_total", ("reason", "no slot"))] == 3
    assert samples[("k3:spec_decode_num_drafts_total",)] == 10
    assert samples[("k3:spec_decode_num_draft_tokens_total",)] == 28
    assert samples[("k3:spec_decode_num_accepted_tokens_total",)] == 17
    place = "k3:spec_decode_num_accepted_tokens_per_pos_total"
    assert [samples[(place, ("position", p))] for p in "012"] == [9, 6, 2]
    assert not any("offload" in name for name, *_ in samples), "there are no tiers"


def test_the_tiers_are_shown_by_tier_outcome_and_reason():
    engine = FakeEngine(says("x"), manual=True)
    engine.more_stats["offload"] = OffloadStats(
        host_bytes=1000,
        host_entries=3,
        disk_bytes=5000,
        disk_entries=9,
        queued=1,
        loading=0,
        stored={"host": 4, "disk": 2},
        loaded={"host": 7},
        loads={"done": 3, "failed": 1},
        loaded_tokens=640,
        store_declined={"queue_full": 2},
        load_declined={"timeout": 1},
    )
    samples = scrape(make_app(engine))
    assert samples[("k3:kv_offload_stored_total", ("tier", "disk"))] == 2
    assert samples[("k3:kv_offload_loaded_total", ("tier", "host"))] == 7
    assert samples[("k3:kv_offload_loads_total", ("outcome", "failed"))] == 1
    assert samples[("k3:kv_offload_loaded_tokens_total",)] == 640
    assert samples[("k3:kv_offload_declines_total", ("reason", "queue_full"), ("what", "store"))] == 2
    assert samples[("k3:kv_offload_declines_total", ("reason", "timeout"), ("what", "load"))] == 1
    assert samples[("k3:kv_offload_bytes", ("tier", "disk"))] == 5000


def test_histograms_are_running_sums():
    samples = scrape(make_app(FakeEngine(says("x"), manual=True)))
    name = "k3:inter_token_latency_seconds"
    assert samples[(f"{name}_bucket", ("le", "0.0025"))] == 0
    assert samples[(f"{name}_bucket", ("le", "0.005"))] == 2
    assert samples[(f"{name}_bucket", ("le", "+Inf"))] == 2
    assert samples[(f"{name}_count",)] == 2
    assert abs(samples[(f"{name}_sum",)] - 0.006) < 1e-12


def test_two_servers_in_a_process_have_a_registry_each():
    first, second = make_app(), make_app()
    ask(first, "GET", "/version")
    assert ("k3:http_responses_total", ("path", "/version"), ("status", "200")) in scrape(first)
    assert ("k3:http_responses_total", ("path", "/version"), ("status", "200")) not in scrape(second)
