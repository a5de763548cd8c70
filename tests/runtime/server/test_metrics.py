"""Metrics: valid exposition, the engine's numbers, nothing shared between two servers."""

from fake_engine import FakeEngine
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
