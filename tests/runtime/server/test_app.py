"""The endpoints for operators, and the shape of everything that is no answer."""

import pytest
from fake_engine import FakeEngine
from serving import ask, make_app, says


def test_the_model_is_listed_and_found_by_name():
    app = make_app()
    models = ask(app, "GET", "/v1/models").json()
    assert models["object"] == "list"
    card = models["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("k3-test", "model", 2048)
    assert ask(app, "GET", "/v1/models/k3-test").json() == card
    assert ask(app, "GET", "/v1/models/a/b").status_code == 404


def test_health_says_why_it_is_not_well():
    engine = FakeEngine(says("x"), manual=True)
    app = make_app(engine, stall_s=5)
    assert ask(app, "GET", "/health").status_code == 200
    engine.current_step_s = 6.0
    sick = ask(app, "GET", "/health")
    assert (sick.status_code, sick.json()) == (503, {"status": "a step has been running for 6 s"})
    engine.current_step_s = 0.0
    engine.alive = False
    assert ask(app, "GET", "/health").status_code == 503


def test_a_closing_server_finishes_nothing_new():
    app = make_app()
    app.state.service.closing = True
    assert ask(app, "GET", "/health").json() == {"status": "the server is stopping"}
    refused = ask(app, "POST", "/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"


def test_the_version_is_shown():
    assert ask(make_app(), "GET", "/version").json() == {"version": "9.9"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/health", 405)],
)
def test_wrong_paths_and_methods_have_the_error_shape(method, path, status):
    response = ask(make_app(), method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_our_own_fault_is_a_500_that_tells_nothing():
    app = make_app()
    app.state.service.engine.stats = None
    response = ask(app, "GET", "/health")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; the server's log has the details"


def test_the_schema_describes_both_bodies():
    paths = ask(make_app(), "GET", "/openapi.json").json()["paths"]
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert field in body["required"]
        assert "temperature" in body["properties"]
