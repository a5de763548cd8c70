"""The page in a real Chromium, from a file: quick with 5,000 nodes, readable, inert, usable by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from k3compile.passes.snapshot import snapshot
from made_graphs import layered, timeline

from k3compile.graphdiff.render_html import html, html_of_several

pytestmark = pytest.mark.browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = {"wide": (1280, 800), "narrow": (390, 844)}

CONTRAST = (Path(__file__).parents[2] / "helpers" / "contrast.js").read_text()
SEARCH = """() => new Promise((done) => {
  const began = performance.now();
  document.getElementById("search").dispatchEvent(new Event("input"));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
})"""
SHIFTS = """() => new Promise((done) => {
  let sum = 0;
  const watch = new PerformanceObserver((seen) => seen.getEntries().forEach((e) => { sum += e.value; }));
  watch.observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 300);
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A headless Chromium, or a skip that says why there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install -e .[test]"
    )
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, tmp_path) -> Iterator:
    """visit(page text, size, scheme) -> a page; what it logged or asked for fails the test at the end."""
    pages, bad = [], []

    def go(text: str, size: str = "wide", scheme: str = "light"):
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.on("console", lambda m: bad.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: bad.append(f"error: {e}"))
        page.on("dialog", lambda d: (bad.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: None if r.url == file.as_uri() else bad.append(f"request: {r.url[:80]}"))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        pages.append(page)
        return page

    yield go
    for page in pages:
        page.close()
    assert not bad


def test_5000_nodes_open_in_3_seconds_and_a_search_takes_no_time(visit):
    page = visit(html(timeline(200)))
    assert "of 5,003 nodes" in page.inner_text("#count")
    opened = page.evaluate("() => performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    first = page.evaluate("() => Number(document.documentElement.dataset.ready)")
    print(f"5,003 nodes: DOMContentLoaded after {opened:.0f} ms, of which the page's own work {first:.0f} ms")
    assert opened < 3000
    slowest = 0.0
    for words in ("m", "mm_1", "mm_19", "slice u0", "attention.py:71", "nothing like it", ""):
        page.fill("#search", words)
        took = min(page.evaluate(SEARCH) for _ in range(3))  # what others do on this machine is not ours
        slowest = max(slowest, took)
    print(f"slowest search, painted: {slowest:.0f} ms")
    assert slowest < 100
    page.fill("#search", "slice_19 aten")
    assert page.inner_text("#count").startswith("22 of ")  # slice_19_i and slice_190_i .. slice_199_i
    assert page.locator("#sizer > *").count() < 120  # the list holds only what is in view


def test_scrolling_a_long_list_shows_the_rows_that_are_there(visit):
    page = visit(html(timeline(200)))
    page.uncheck("#fold")
    page.evaluate("() => { document.getElementById('list').scrollTop = 1e9; }")
    page.wait_for_function(
        "() => document.getElementById('sizer').lastElementChild.textContent.includes('output')"
    )


@pytest.mark.parametrize("data", [layered(40), timeline(40)], ids=["graph", "timeline"])
@pytest.mark.parametrize("size", SIZES)
def test_the_list_takes_the_room_there_is(visit, data, size):
    page = visit(html(data), size)
    assert page.locator("#list").bounding_box()["height"] > SIZES[size][1] / 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_nothing_sticks_out(visit, size, scheme):
    page = visit(html(timeline(4)), size, scheme)
    page.check("#alias")
    for _ in range(3):
        page.keyboard.press("n")
    worst = page.evaluate(CONTRAST)
    assert len(worst) > 60
    assert worst[0][0] >= 4.5, worst[:3]
    widths = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == (
        "rgb(252, 252, 251)" if scheme == "light" else "rgb(23, 25, 27)"
    )
    for fixed in ("h1", "#search", "#count", "#detail h2"):
        box = page.locator(fixed).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= widths[1]


def test_long_names_and_long_titles_do_not_widen_a_narrow_page(visit):
    graph = layered(1)
    for node in graph["nodes"]:
        node["name"] = "a_very_long_name_" * 9 + str(node["id"])
        node["source"] = "folder/" * 30 + "file.py:1"
    page = visit(html(graph, title="k3_" * 80), "narrow")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_hostile_names_stay_text(visit):
    evil = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    line = timeline(1)
    graph = line["stages"][0]["snapshot"]
    for node in graph["nodes"]:
        node["name"], node["source"], node["from"] = f"{evil}{node['id']}", evil, [evil]
        if node["op"] == "call_function":
            node["target"] = evil
    page = visit(html({"schema": "k3timeline/1", "graph": evil, "stages": line["stages"][:1]}))
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert evil in page.inner_text("#detail h2")
    assert evil in page.inner_text("h1")


def test_the_keyboard_reaches_passes_nodes_changes_and_search(visit):
    page = visit(html(timeline(2)))

    def stage() -> str:
        return page.inner_text("#strip [aria-selected=true] b")

    def node() -> str:
        return page.inner_text("#detail h2")

    assert stage() == "contiguous_views"  # the first pass that changed something
    page.keyboard.press("ArrowLeft")
    assert stage() == "canonicalize"
    assert "no change" in page.inner_text("#strip [aria-selected=true]")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert stage() == "captured"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("n")
    assert node().startswith("slice_0_0")
    assert "rewritten" in node()
    assert "index_select" in page.inner_text("#detail table")
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert "removed" in node()
    page.keyboard.press("p")
    assert node().startswith("slice_0_1")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert node() == "rows"
    page.keyboard.press("/")
    page.keyboard.type("gate_1")
    assert page.inner_text("#count").startswith("1 of ")
    page.keyboard.press("ArrowDown")
    assert node() == "gate_1"
    page.keyboard.press("Escape")
    assert page.input_value("#search") == ""
    page.keyboard.press("Escape")
    assert page.locator("#around").is_hidden()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement !== document.body")


def test_a_node_tells_what_it_is_what_it_shares_and_what_the_pass_said(visit):
    page = visit(html(timeline(2)))
    page.keyboard.press("n")
    told = page.inner_text("#detail")
    for word in ("aten.slice.Tensor", "aten.index_select.default", "stride", "attention.py:", "shared with"):
        assert word in told
    assert "applied" in told
    assert "end <= size: u0 <= s0 by torch._check" in told
    assert "fix: " in page.evaluate(
        "() => getComputedStyle(document.querySelector('.fix'), '::before').content"
    )
    assert "torch._check(u0 <= x.shape[0])" in page.inner_text("#pass")
    assert page.locator("#drawing g.box").count() > 3
    assert page.locator("#detail details").get_attribute("open") is not None
    assert page.locator("#pass .remark details").first.get_attribute("open") is None
    page.locator("#pass .remark a.node").last.click()
    assert page.inner_text("#detail h2").startswith("slice_0_1")
    assert page.evaluate("() => document.getElementById('side').scrollTop") == 0
    other = page.locator("#drawing g.box:not(.picked)").first
    name = other.locator("text").first.text_content().split(" ")[-1]
    other.focus()
    page.keyboard.press("Enter")
    assert page.inner_text("#detail h2").startswith(name)


def test_repeated_layers_are_folded_until_asked(visit):
    page = visit(html(timeline(6)))
    folded = page.locator(".row.fold")
    assert "5 more like the 25 rows above (×6 in all)" in folded.inner_text()
    shown = page.inner_text("#count")
    folded.scroll_into_view_if_needed()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    folded.click()  # after the list has drawn what the scrolling brought: a row drawn anew takes no click
    assert page.inner_text("#count") != shown
    assert page.inner_text("#count").startswith("153 of 153")


def test_costs_of_the_pass_stand_side_by_side(visit):
    table = visit(html(timeline(4))).inner_text("#pass")
    assert "launches" in table
    assert "100" in table
    assert "88" in table
    assert "−12 (−12\u00a0%)" in table


def test_symbolic_costs_are_evaluated_at_the_reader_s_sizes(visit):
    line = timeline(1)
    line["stages"][-2]["cost"] = {"launches": 30, "bytes_read": "4*s0*(u0 + 1)"}
    line["stages"][-1]["cost"] = {
        "launches": 30,
        "bytes_read": "Min(8, 2*s0) + s0**2 // 3 - -FloorDiv(u0, 4)",
        "symbols": {"u0": "rows of x"},
    }
    page = visit(html(line))
    page.fill("[data-symbol=s0]", "10")
    page.press("[data-symbol=s0]", "Enter")
    page.fill("[data-symbol=u0]", "7")
    page.press("[data-symbol=u0]", "Enter")
    cells = page.locator("#cost tr", has_text="bytes read").locator("td").all_inner_texts()
    assert [c.replace("\u00a0", " ") for c in cells] == ["320 B", "42 B", "−278 B (−87 %)"]
    assert page.locator("#cost tr", has_text="launches").locator("td").last.inner_text() == "0"
    assert "rows of x" in page.inner_text("#pass")
    assert page.locator("[data-symbol=u0]").evaluate("(e) => e === document.activeElement")


def test_a_cost_that_cannot_be_read_leaves_its_formula(visit):
    line = timeline(1)
    line["stages"][-1]["cost"] = {"bytes_read": "Piecewise((s0, s0 > 2)); alert(1)"}
    page = visit(html(line))
    assert page.locator("#cost td").all_inner_texts()[1] == ""
    page.click("summary")
    assert "Piecewise((s0, s0 > 2)); alert(1)" in page.inner_text("details")


def test_a_rewrite_of_many_nodes_is_told_as_one(visit):
    line = timeline(1)
    for change in line["stages"][-1]["delta"]["changes"]:
        change.update(kind="rewritten", group=0)
    line["stages"][-1]["delta"]["changes"].append(
        {"kind": "meta", "before": None, "after": None, "detail": "u0 is at most 64", "group": None}
    )
    page = visit(html(line))
    page.keyboard.press("n")
    assert "one rewrite with ~%slice_0_1, −%index_copy_0" in page.inner_text("#detail")
    page.click("#filters button:has-text('rewritten')")
    assert page.inner_text("#count").startswith("3 of ")
    assert "the whole graph: u0 is at most 64" in page.inner_text("#pass")


def test_a_traced_graph_of_any_node_kind_can_be_walked(visit):
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(3))
            self.inner = torch.nn.Linear(3, 3)

        def forward(self, x, y):
            z = self.inner(x).clamp(min=float("-inf")) * self.gain
            return {"out": [z[:, 1:2], y], "same": z.view(-1).to(torch.float64)}

    page = visit(html(snapshot(torch.fx.symbolic_trace(Block()), level="dynamo")))
    seen = []
    for _ in range(20):
        page.keyboard.press("ArrowDown")
        seen.append(page.inner_text("#detail table"))
    assert "slice(1, 2, None)" in "".join(seen)
    assert "-inf" in "".join(seen)


def test_the_theme_can_be_switched_and_the_page_printed(visit):
    page = visit(html(timeline(2)), scheme="dark")
    page.click("#theme")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "light"
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("#print p").count() == 6
    assert page.locator("#print").is_visible()
    assert page.locator("#tools").is_hidden()


def test_nothing_moves_once_it_is_drawn(visit):
    page = visit(html(timeline(40)))
    shift = page.evaluate(SHIFTS)
    assert shift < 0.01


def test_several_graphs_are_chosen_at_the_top_each_with_its_own_sizes_and_generated_code(visit):
    one = timeline(3)
    code = {"before": {"launches": 9}, "after": {"launches": 6}}
    page = visit(html_of_several([("kda", 69, one | {"generated": code}), ("mla", 24, timeline(2))]))
    assert page.locator("#graphs option").all_inner_texts() == ["kda ×69", "mla ×24"]
    before = page.inner_text("#count")
    page.locator("#strip button").last.click()
    assert "launches\t9\t6" in page.inner_text("#code")
    page.select_option("#graphs", "1")
    assert page.inner_text("#count") != before
    assert page.locator("#strip button").count() == len(timeline(2)["stages"])
    page.locator("#strip button").last.click()
    assert page.locator("#code").count() == 0


def test_one_graph_has_no_list_of_graphs(visit):
    assert not visit(html(timeline(2))).is_visible("#graphs")
