"""`k3 export`: a graph, a diff or a dump as one HTML page, ONNX for Netron, or JSON; a layer as ONNX to run.

k3 export dump/<graph> --to html -o passes.html         every pass, offline
k3 export dump/<graph> --to onnx --stage contiguous_views -o views.onnx
k3 export checkpoints/k3-tiny --semantic --layer 1 -o layer.onnx       standard operators, weights inside
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..features import nearest

FORMATS = ("html", "onnx", "json", "mermaid", "dot")
ENDINGS = {"mmd": "mermaid"}


def export(
    path: Annotated[
        Path, typer.Argument(help="A graph, diff or timeline (JSON), a dump's folder, or a checkpoint.")
    ],
    to: Annotated[str | None, typer.Option("--to", help="html, onnx, json, mermaid or dot.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")] = None,
    stage: Annotated[
        str | None, typer.Option(help="Draw what this pass changed; default: the last graph.")
    ] = None,
    semantic: Annotated[
        bool, typer.Option("--semantic", help="A checkpoint in standard ONNX operators.")
    ] = False,
    layer: Annotated[
        int | None, typer.Option(help="With --semantic: one layer, from 0; default: all.")
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="With --semantic: put out KDA states at checkpoint_at, too.")
    ] = False,
) -> int:
    """Write one file that another tool opens: a browser, Netron, an ONNX runtime."""
    kind = format_of(to, output, semantic)
    target = output or Path(f"{path.resolve().name.removesuffix('.json')}.{kind}")
    if target.resolve() == path.resolve():
        raise ValueError(f"{target} would be written over itself: give another file with -o")
    if not semantic and (layer is not None or checkpoint):
        raise ValueError("--layer and --checkpoint go with --semantic")
    if semantic and stage:
        raise ValueError("--stage chooses a pass of a dump and does not go with --semantic")
    if kind == "onnx":
        made = meaning(path, layer, checkpoint) if semantic else picture(path, stage)
        content = made.SerializeToString()
    else:
        content = text(path, kind, stage).encode()
    target.write_bytes(content)
    print(f"{target}: {len(content):,} bytes of {kind}")
    return 0


def format_of(to: str | None, output: Path | None, semantic: bool) -> str:
    """``--to``, else the ending of the file to write."""
    ending = output.suffix.removeprefix(".") if output else ""
    kind = to or ("onnx" if semantic else ENDINGS.get(ending, ending))
    if kind not in FORMATS:
        if not to and not ending:
            raise ValueError(f"say what to write: --to {' or '.join(FORMATS)}")
        raise ValueError(f"cannot write {kind!r}{nearest(kind, FORMATS)}: formats are {', '.join(FORMATS)}")
    if semantic and kind != "onnx":
        raise ValueError("--semantic writes ONNX: give --to onnx")
    return kind


def text(path: Path, kind: str, stage: str | None) -> str:
    """A page, the data behind it, or a drawing."""
    if kind in ("mermaid", "dot"):
        from ..graphdiff.diff import diff
        from ..graphdiff.render_graph import RENDERERS

        before, after = sides(path, stage)
        return RENDERERS[kind](diff(before or after, after))
    from .graph_files import graphs_in, is_dump

    if stage:
        raise ValueError("--stage goes with --to onnx, mermaid or dot; a page and a timeline hold every pass")
    if kind == "html" and is_dump(path) and len(found := graphs_in(path)) > 1:
        from ..graphdiff.render_html import html_of_several

        return html_of_several([(one["graph"], 1, one) for one in found], title=path.resolve().name)
    data = graph_at(path)
    if kind == "json":
        return json.dumps(data, indent=1) + "\n"
    from ..graphdiff.render_html import html

    return html(data, title="" if data["schema"] == "k3timeline/1" else path.name)


def graph_at(path: Path) -> dict[str, Any]:
    """The graph, diff or timeline; for a checkpoint, what to do instead."""
    from .graph_files import is_dump, one_graph

    if path.is_dir() and (path / "config.json").is_file() and not is_dump(path):
        raise ValueError(
            f"{path} is a checkpoint: add --semantic for its layers, or dump its graphs with "
            f"`K3_DUMP=dump k3 explain {path}` and export dump/<graph>"
        )
    return one_graph(path)


def sides(path: Path, stage: str | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """What to draw: one graph (None, graph), or two to compare: a diff's, or those around a pass."""
    data = graph_at(path)
    if stage and data["schema"] != "k3timeline/1":
        raise ValueError(f"{path} is a {data['schema']}; --stage chooses a pass of a dump or a timeline")
    if data["schema"] == "k3graph/1":
        return None, data
    if data["schema"] == "k3diff/1":
        return data["before"], data["after"]
    stages = data["stages"]
    if not stage:
        return None, stages[-1]["snapshot"]
    names = [s["name"] for s in stages]
    if stage not in names:
        raise ValueError(f"no stage {stage!r}{nearest(stage, names)}: stages are {', '.join(names)}")
    at = names.index(stage)
    before, after = (stages[i]["snapshot"] for i in (max(at - 1, 0), at))
    return (None if at == 0 or before["level"] != after["level"] else before), after


def picture(path: Path, stage: str | None) -> Any:
    """ONNX to look at: a graph, or two as one model with marks."""
    from ..graphdiff.diff import diff
    from ..graphdiff.onnx_graph import diff_to_onnx, to_onnx

    before, after = sides(path, stage)
    return to_onnx(after) if before is None else diff_to_onnx(diff(before, after).to_json())


def meaning(path: Path, layer: int | None, checkpoint: bool) -> Any:
    """ONNX to run: a layer of a checkpoint, or all of it, in float32."""
    import torch

    from ..graphdiff.onnx_graph import onnx_package
    from .loading import check_checkpoint

    onnx_package()
    check_checkpoint(path)
    from ..runtime.weights import load_model
    from ..semantic import layer_to_onnx, model_to_onnx

    model = load_model(path, dtype=torch.float32)
    return model_to_onnx(model, checkpoint) if layer is None else layer_to_onnx(model, layer, checkpoint)
