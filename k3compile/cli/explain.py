"""`k3 explain`: what the passes do to a model and why, or what one pass is for.

k3 explain checkpoints/k3-tiny                     every pass, equal layers folded
k3 explain checkpoints/k3-tiny --pass contiguous_views --json
k3 explain contiguous_views                        the pass's own words, and what it did last
k3 explain report.json                             a report that a compile wrote (options={"report": FILE})
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer


def explain(
    target: Annotated[
        str, typer.Argument(help="A checkpoint's folder (config.json is enough), a pass, or a report.")
    ],
    pass_name: Annotated[str | None, typer.Option("--pass", help="Only this pass.")] = None,
    inner: Annotated[str, typer.Option(help="aot_eager is quick; inductor also shows what it opens.")] = (
        "aot_eager"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say for every site of every pass whether it was rewritten, with the proofs or the reason."""
    from ..features import nearest
    from ..options import CompileOptions, read_switches
    from .graph_files import check_model

    read_switches()  # a mistake in them is told here, not by a compile that fails
    names = passes_by_name()
    if pass_name is not None and pass_name not in names:
        hint = nearest(pass_name, names)
        raise ValueError(f"--pass is {pass_name!r}{hint}; passes: {', '.join(names)}")
    if not Path(target).exists():
        if target not in names:
            raise ValueError(
                f"{target!r} is neither a folder, a report nor a pass{nearest(target, names)}; "
                f"passes: {', '.join(names)}"
            )
        return explain_pass(target, names[target], as_json)

    if reports := reports_in(Path(target)):
        return explain_reports(reports, pass_name, as_json)
    check_model(Path(target), "a report")

    from ..kinds import compile_kinds
    from ..runtime.config import K3Config

    kinds = compile_kinds(K3Config.from_file(target), CompileOptions(inner=inner))
    shown = [pass_name] if pass_name else list(names)
    if as_json:
        print(json.dumps([as_data(k, shown) for k in kinds], indent=2))
        return 0
    print(f"{target}: {sum(k.layers for k in kinds)} layers of {len(kinds)} kinds, compiled for {inner}")
    for kind in kinds:
        print(f"  {kind.name} x{kind.layers}")
    for name in shown:
        print("\n" + "\n".join(text_of(name, kinds)))
    return 0


def reports_in(path: Path) -> list[Any]:
    """The reports of a JSON file; none for a folder and for a file that is a configuration.

    Raises ValueError for a file of ours that is no report, saying what reads it.
    """
    from ..report import Report
    from .graph_files import schema_of

    schema = schema_of(path)
    if schema is None:
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    if schema not in ("k3report/1", "k3reports/1"):
        raise ValueError(f"{path} is a {schema}, not a report: look at it with `k3 inspect {path}`")
    try:
        return [Report.from_json(r) for r in (data["reports"] if schema == "k3reports/1" else [data])]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is a damaged {schema}, {error} is wrong: compile again") from error


def explain_reports(reports: list[Any], pass_name: str | None, as_json: bool) -> int:
    """Stored reports as text or JSON, records of other passes left out."""
    from dataclasses import replace

    if pass_name is not None:
        reports = [replace(r, records=tuple(p for p in r.records if p.name == pass_name)) for r in reports]
    if as_json:
        print(json.dumps([r.to_json() for r in reports], indent=2))
    else:
        print("\n\n".join(r.text() for r in reports))
    return 0


def passes_by_name() -> dict[str, Any]:
    """The passes of the pipeline, and lowering after them."""
    from ..passes.lower import Lower
    from ..passes.pipeline import ATEN_PASSES, DYNAMO_PASSES

    return {p.name: p for p in (*DYNAMO_PASSES, *ATEN_PASSES, Lower())}


def text_of(name: str, kinds: Iterable[Any]) -> Iterator[str]:
    """One pass over all layers: the counts, then each different remark with the sites it stands for."""
    from ..passes.symbol_names import meant

    sites: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for kind in kinds:
        for remark in kind.report.remarks:
            if remark.pass_name == name:
                sites[remark.kind] += kind.layers
                lines[block_of(meant(remark, kind.report.sizes))] += kind.layers
    total = ", ".join(f"{count} {what}" for what, count in sites.items()) or "no site"
    yield f"{name}: {total}"
    for block, count in lines.items():
        first, *rest = block.splitlines()
        yield f"  x{count:<4d} {first}"
        yield from (f"        {line}" for line in rest)


def block_of(remark: Any) -> str:
    """A remark as lines, the first one without a count."""
    from ..report import folded

    return "\n".join(folded([remark]))


def as_data(kind: Any, shown: list[str]) -> dict[str, Any]:
    """One kind of layer as plain data, records of other passes left out."""
    report = kind.report.to_json()
    report["records"] = [r for r in report["records"] if r["name"] in shown]
    return {"kind": list(kind.kind), "name": kind.name, "layers": kind.layers, "report": report}


def explain_pass(name: str, one: Any, as_json: bool) -> int:
    """The pass's docstring, and its counts in the reports stored last."""
    words = (sys.modules[type(one).__module__].__doc__ or "").strip()
    last = list(last_counts(name))
    if as_json:
        print(json.dumps({"pass": name, "level": one.level, "keeps": one.keeps, "doc": words, "last": last}))
        return 0
    print(f"{name} ({one.level} level, {one.keeps})\n\n{words}\n")
    if not last:
        print("no report is stored beside the compile cache")
    for entry in last:
        print(f"graph {entry['graph']}: applied {entry['applied']}, missed {entry['missed']}")
    return 0


def last_counts(name: str, limit: int = 8) -> Iterator[dict[str, Any]]:
    """Counts of one pass in the newest stored reports that ran it."""
    from ..report import stored
    from ..torch_private import cache_folder

    folder = cache_folder()
    files = sorted(folder.glob("*.json"), key=lambda f: f.stat().st_mtime, reverse=True)
    for path in files:
        report = stored(path.stem, folder)
        if report is None or name not in [r.name for r in report.records]:
            continue
        yield {"graph": report.key, "applied": report.applied(name), "missed": len(report.missed(name))}
        limit -= 1
        if not limit:
            return
