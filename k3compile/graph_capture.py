"""The graphs of a callable, or of every kind of layer of a model, as they are before and after each pass.

timelines = k3compile.capture(model, x)          one a graph: captured -> contiguous_views -> ... -> lower
print(render_text.timeline_text(timelines[0]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from .dump import Seen, recording
from .graphdiff.timeline import Timeline, of_passes
from .options import CompileOptions, parse, pass_names

if TYPE_CHECKING:
    from .report import Report
    from .runtime.config import K3Config

Bodies = Sequence[dict[str, int]]
_number = count()
QUICK = "aot_eager"  # the passes see the same graph as for Inductor, without the C++


class KindTimeline(NamedTuple):
    """One kind of layer: its name, how many layers are like it, its graph."""

    name: str
    layers: int
    timeline: Timeline


def capture(
    fn: Callable[..., Any],
    *args: Any,
    options: CompileOptions | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> list[Timeline]:
    """Compile ``fn`` for the arguments, run it once under ``no_grad``; returns one timeline a graph.

    options: as for ``torch.compile(..., backend="k3")``; ``inner`` is ``aot_eager`` unless given; for
    ``inductor`` a timeline counts what the generated code launches and allocates, too.
    dynamic: as for ``torch.compile``. Raises ValueError for bad options or where nothing was compiled, and
    whatever the call raises.
    """
    import torch

    from .backend import compile_with_report

    reports: list[Report] = []
    chosen = options if isinstance(options, CompileOptions) else parse({"inner": QUICK, **(options or {})})

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        compiled, report = compile_with_report(gm, inputs, chosen)
        reports.append(report)
        return compiled

    # Dynamo keeps what it compiled with the code object: one of its own leaves the user's cache alone
    call = fresh(fn)
    with recording() as seen, torch.no_grad():
        torch.compile(call, backend=backend, dynamic=dynamic)(*args, **kwargs)
    code = {report.key: report.generated for report in reports}
    found = [replace(one, generated=counted((), code.get(one.graph, ()))) for one in timelines(seen)]
    if not found:
        raise ValueError(f"{getattr(fn, '__name__', fn)!r} compiled no graph on which a pass ran")
    return found


def fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a code object of its own that calls ``fn``; of its own name too, since Dynamo makes sizes
    dynamic that were others in an earlier call of the same name and line."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"capture_{next(_number)}")
    return call


def capture_kinds(config: K3Config, options: CompileOptions) -> list[KindTimeline]:
    """A timeline for each kind of layer of a model, without its weights.

    For Inductor each kind is compiled a second time, without passes, so that its code can be counted too.
    """
    from .kinds import compile_kinds

    with recording() as seen:
        kinds = compile_kinds(config, options)
    found = {one.graph: one for one in timelines(seen)}
    bare = {}
    if options.inner == "inductor":
        without = replace(options, disable=tuple(pass_names()))
        bare = {kind.name: kind.report.generated for kind in compile_kinds(config, without)}
    return [
        KindTimeline(
            k.name,
            k.layers,
            replace(found[k.report.key], generated=counted(bare.get(k.name, ()), k.report.generated)),
        )
        for k in kinds
        if k.report.key in found
    ]


def counted(before: Bodies, after: Bodies) -> dict[str, dict[str, int]]:
    """The counts of the generated code as a timeline keeps them; of several bodies, the fastest."""
    return {
        moment: bodies[-1]
        for moment, bodies in (("before", before), ("after", after))
        if bodies and bodies[-1]
    }


def timelines(seen: Iterable[Seen]) -> list[Timeline]:
    """What was recorded, by graph; of a graph that was compiled again, the last time."""
    by_graph: dict[str, list[Seen]] = {}
    for one in seen:
        by_graph.setdefault(one.key, []).append(one)
    return [
        of_passes(key, [(s.name, s.before, s.after) for s in last_run(runs)])
        for key, runs in by_graph.items()
    ]


def last_run(passes: list[Seen]) -> list[Seen]:
    """A compile that is stepped back starts over with Dynamo's graph."""
    starts = [
        i
        for i, s in enumerate(passes)
        if s.before["level"] == "dynamo" and (not i or passes[i - 1].before["level"] != "dynamo")
    ]
    return passes[starts[-1] :] if starts else passes
