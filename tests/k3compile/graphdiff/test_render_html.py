"""The page is one inert file: everything is inside, nothing a graph says can become markup or script."""

import base64
import hashlib
import json
import re

import pytest
from made_graphs import delta, layered, timeline

from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.render_html import html, of_stages


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_is_one_file_without_an_address():
    page = html(timeline(3))
    assert page.startswith("<!doctype html>")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", page)
    assert re.findall(r"https?://\S+", page) == ['http://www.w3.org/2000/svg";']  # a name, not an address
    assert "@" not in re.sub(r"<(style|script).*?</\1>", "", page, flags=re.S)


def test_the_policy_names_exactly_the_script_and_style_that_are_there():
    page = html(timeline(1))
    for tag in ("style", "script"):
        block = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1]
        want = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{want}'" in page


def test_a_name_cannot_close_its_block_nor_name_a_place_of_the_template():
    graph = layered(1)
    evil = "</script><script>alert(1)</script><!-- @SCRIPT@ @TITLE@ &lt; \u2028"
    graph["nodes"][2]["name"] = graph["nodes"][2]["source"] = evil
    page = html(graph, title="<img src=x onerror=alert(1)>")
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert data_of(page)["snapshots"][0]["nodes"][2]["name"] == evil


def test_all_three_schemas_become_stages():
    before, after = layered(2), layered(2, views=True)
    one = data_of(html(before))
    assert [s["name"] for s in one["stages"]] == ["graph"]
    found = {"schema": "k3diff/1", "before": before, "after": after, **delta(before, after)}
    two = data_of(html(found | {"costs": {"before": {"launches": 5}, "after": {"launches": 3}}}))
    assert [(s["name"], s["cost"]) for s in two["stages"]] == [
        ("before", {"launches": 5}),
        ("after", {"launches": 3}),
    ]
    assert two["stages"][1]["delta"]["changes"] == found["changes"]
    assert "graph diff" in html(found | {"costs": None})


def test_a_pass_that_changed_nothing_adds_no_graph():
    content = of_stages("t", "s", timeline(2)["stages"])
    assert len(content["snapshots"]) == 2
    assert [s["snapshot"] for s in content["stages"]] == [0, 0, 1]
    assert content["stages"][1]["delta"]["changes"] == []


def test_graphs_of_two_levels_are_not_compared():
    high, low = layered(1) | {"level": "dynamo"}, layered(1, views=True)
    stages = [{"name": "captured", "snapshot": high}, {"name": "aten graph", "snapshot": low}]
    assert [s["delta"] for s in of_stages("t", "s", stages)["stages"]] == [None, None]


def test_costs_are_estimated_where_they_are_not_given():
    given, computed = timeline(1), timeline(1, costs=False)
    assert data_of(html(given))["stages"][0]["cost"] == {"launches": 25, "bytes_read": "256*s0 + 64*u0"}
    assert data_of(html(computed))["stages"][0]["cost"]["launches"] > 0
    bare = layered(1)
    for node in bare["nodes"]:
        node["value"] = None
    assert data_of(html(bare))["stages"][0]["cost"] is None


def test_a_delta_that_is_not_given_is_computed():
    stages = [{"name": "a", "snapshot": layered(1)}, {"name": "b", "snapshot": layered(1, views=True)}]
    (delta,) = [s["delta"] for s in of_stages("t", "s", stages)["stages"] if s["delta"]]
    want = diff(layered(1), layered(1, views=True)).to_json()
    assert delta == {"pairs": want["pairs"], "changes": want["changes"]}
    assert delta["changes"]


@pytest.mark.parametrize("wrong", [{}, {"schema": "k3report/1"}, []])
def test_another_schema_is_refused_with_those_there_are(wrong):
    with pytest.raises(ValueError, match=r"give one of k3timeline/1, k3diff/1, k3graph/1"):
        html(wrong)


def test_a_timeline_without_a_stage_is_refused():
    with pytest.raises(ValueError, match="no stage"):
        html({"schema": "k3timeline/1", "graph": "g", "stages": []})
