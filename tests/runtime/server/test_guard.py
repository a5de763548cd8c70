"""The API key, and labels that clients cannot make up."""

import pytest
from serving import ask, make_app

KEYED = make_app(api_key="sesame-ä")


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Authorization": "sesame"},
     {"Authorization": "Basic sesame"}, {"Authorization": b"Bearer \xff"}],
)  # fmt: skip
def test_without_the_key_v1_is_closed(headers):
    for path in ("/v1/models", "/v1/nowhere"):
        response = ask(KEYED, "GET", path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_with_the_key_it_is_open():
    for scheme in (b"Bearer ", b"bearer  "):
        headers = {"Authorization": scheme + "sesame-ä".encode()}
        assert ask(KEYED, "GET", "/v1/models", headers=headers).status_code == 200


def test_probes_need_no_key():
    for path in ("/health", "/metrics", "/version"):
        assert ask(KEYED, "GET", path).status_code == 200


def test_without_a_key_configured_any_client_is_served():
    assert ask(make_app(), "GET", "/v1/models").status_code == 200


def test_responses_are_counted_by_known_path_and_status():
    app = make_app()
    for path in ("/version", "/version", "/nowhere", "/nowhere/else"):
        ask(app, "GET", path)
    text = ask(app, "GET", "/metrics").text
    assert 'k3:http_responses_total{path="/version",status="200"} 2.0' in text
    assert 'k3:http_responses_total{path="other",status="404"} 2.0' in text
