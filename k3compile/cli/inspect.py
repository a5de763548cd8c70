"""`k3 inspect PATH`: what a checkpoint is and whether it is whole, unread; or what a graph holds.

KDA + MoE              5 layers     5,310,000 bytes
...
whole: 618 tensors as config.json asks for      or every problem, one a line, and exit code 1
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..runtime.config import K3Config
    from ..runtime.layout import Entry


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a config.json, a graph's JSON, a dump.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show layers, tensors and bytes, and all that is wrong with files, names, shapes; exit code 1 if any.

    Of a graph, a diff, a timeline or a K3_DUMP folder: nodes by op, symbols, shared storages, passes.
    """
    from .graph_files import check_model, is_dump, schema_of

    if is_dump(path) or schema_of(path):
        return inspect_graphs(path, as_json)
    if path.exists():
        check_model(path, "a graph, a diff, a timeline or a K3_DUMP folder")
    found = examined(path)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(Console(highlight=False), found)
    return 1 if found["problems"] else 0


def inspect_graphs(path: Path, as_json: bool) -> int:
    """The same for graphs, of which nothing can be wrong."""
    from .inspect_graph import examined_graphs, show_graph

    found = examined_graphs(path)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    for i, graph in enumerate(found):
        print("\n" if i else "", end="")
        show_graph(Console(highlight=False), graph)
    return 0


def examined(path: Path) -> dict[str, Any]:
    """The report as plain values; ``problems`` is None when there are no weights to hold it against."""
    from ..runtime.config import K3Config
    from ..runtime.layout import entries
    from ..runtime.weights import examine

    if path.is_dir():
        config, _, wanted, problems = examine(path)
        tensors = list(wanted.values())
    else:
        config, problems = K3Config.from_file(path), None
        tensors = list(entries(config))
    parts = bytes_by_part(config, tensors)
    kinds = Counter(kind_name(config, layer) for layer in range(config.num_hidden_layers))
    return {
        "family": config.family,
        "layers": {kind: {"count": kinds[kind], "bytes": parts[kind]} for kind in kinds},
        "rest_bytes": parts["rest"],
        "tensors": len(tensors),
        "bytes": sum(parts.values()),
        "experts": "MXFP4" if config.experts_packed else config.dtype,
        "problems": problems,
    }


def kind_name(config: K3Config, layer: int) -> str:
    """KDA + MoE + snapshot, ..."""
    attention, ffn, snapshot = config.kind(layer)
    return f"{attention.upper()} + {'MoE' if ffn == 'moe' else 'dense'}{' + snapshot' if snapshot else ''}"


def bytes_by_part(config: K3Config, tensors: list[Entry]) -> Counter[str]:
    """Bytes of each kind of layer, and of the rest."""
    import torch

    parts: Counter[str] = Counter()
    for entry in tensors:
        _, _, below = entry.name.partition(".layers.")
        part = kind_name(config, int(below.split(".")[0])) if below else "rest"
        parts[part] += torch.Size(entry.shape).numel() * entry.dtype.itemsize
    return parts


def show(console: Console, found: dict[str, Any]) -> None:
    """For people."""
    table = Table("part", "layers", "bytes", box=None)
    for kind, part in found["layers"].items():
        table.add_row(kind, str(part["count"]), f"{part['bytes']:,}")
    table.add_row("embedding, head, final norm", "", f"{found['rest_bytes']:,}")
    table.add_row("all", str(sum(part["count"] for part in found["layers"].values())), f"{found['bytes']:,}")
    console.print(f"{found['family']}, experts in {found['experts']}, {found['tensors']:,} text tensors")
    console.print(table)
    if found["problems"] is None:
        console.print("a configuration alone: no weights to check")
    elif not found["problems"]:
        console.print(
            "whole: every tensor that config.json asks for, and no other (values are checked on loading)"
        )
    for problem in found["problems"] or ():
        console.print(problem, markup=False, soft_wrap=True)
