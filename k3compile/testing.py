"""Assertions on compiled graphs, for the tests of users' models.

def test_the_views_are_found():
    assert_rewrites(model, (x,), contiguous_views=4)

def test_the_graph_is_the_one_reviewed(request):
    assert_same_graph(model, (x,), Path(__file__).with_name("model.k3graph"), update=...)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .graph_capture import capture
from .graphdiff.asserts import Budget, Limit, check
from .graphdiff.diff import diff
from .graphdiff.render_text import text as diff_text
from .graphdiff.timeline import Timeline
from .options import pass_names, unknown_names
from .passes.snapshot_text import text


def assert_rewrites(
    fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None = None, **counts: int
) -> list[Timeline]:
    """Raise AssertionError unless each pass rewrote exactly ``counts`` sites in the graphs of ``fn(*args)``.

    The message holds the reasons of the sites that were missed. Returns the timelines. Raises ValueError for
    a name that is no pass.
    """
    if wrong := unknown_names(counts, pass_names()):
        raise ValueError(f"no pass is called {wrong}; passes: {', '.join(pass_names())}")
    found = capture(fn, *args, options=options)
    everything = Timeline("all", tuple(stage for one in found for stage in one.stages))
    budget = Budget(tuple(Limit(f"applied.{name}", "=", count) for name, count in counts.items()))
    failed = [r.message for r in check(budget, everything) if not r.ok]
    if failed:
        raise AssertionError("\n".join(failed))
    return found


def assert_same_graph(
    fn: Callable[..., Any],
    args: Sequence[Any],
    golden: Path,
    update: bool = False,
    options: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Raise AssertionError, with the diff, unless the final graph of ``fn(*args)`` is the one in ``golden``.

    ``golden`` holds the text to review; the snapshot to compare with is ``<golden>.json``.
    Names, order, symbol numbers and source lines do not count. ``update`` writes both and passes. ``fn``
    has to compile to one graph. ignore: attributes not to compare, of ``graphdiff.compare.ATTRIBUTES``.
    """
    found = capture(fn, *args, options=options)
    if len(found) != 1:
        raise AssertionError(f"{len(found)} graphs; a golden is of one: call with fullgraph in mind")
    snapshot = stripped(found[0].stages[-1].snapshot)
    data = golden.with_name(golden.name + ".json")
    if update:
        golden.write_text(text(snapshot))
        data.write_text(json.dumps(snapshot, indent=1) + "\n")
        return
    if not data.exists():
        raise AssertionError(f"{data} does not exist; call with update=True to write it")
    found_diff = diff(json.loads(data.read_text()), snapshot, ignore)
    if not found_diff.same:
        raise AssertionError(
            f"not the graph of {golden}:\n{diff_text(found_diff)}call with update=True to accept"
        )


def stripped(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot without what changes from run to run and place to place."""
    gone = ("input", "source", "module", "from", "was", "replaces")
    nodes = [{k: v for k, v in n.items() if k not in gone} | {"source": None} for n in snapshot["nodes"]]
    kept = ("schema", "level", "symbols", "edges")
    return {k: snapshot[k] for k in kept} | {"nodes": nodes}
