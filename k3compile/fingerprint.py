"""What a compiled graph depends on besides itself: our sources, the options, the ranks, the device.

Inductor's caches take the fingerprint as the name of our passes. Whatever changes their work has to change
it, or a warm start would run code that today's sources would not make.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import kernels, passes
from .options import CompileOptions
from .passes.communication import group_of
from .passes.lower import ranks_of

OWN_FILES = (
    "annotations",
    "backend",
    "difference",
    "example_values",
    "export",
    "extra_inputs",
    "features",
    "fingerprint",
    "inner",
    "islands",
    "opened_ops",
    "options",
    "torch_private",
    "verify",
    "versions",
)


def fingerprint(options: CompileOptions, gm: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> str:
    """24 hexadecimal digits. more: further plain values that change what the passes do."""
    words = {
        "sources": digest_of_sources(),
        "torch": torch.__version__,
        "options": options.canonical(),
        "groups": groups_of(gm),
        "devices": sorted({device_name(t.device) for t in inputs if isinstance(t, torch.Tensor)}),
        **more,
    }
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def digest_of_sources() -> str:
    """The text of every module that can change a compiled graph, kernels included."""
    return digest_of(source_files(Path(__file__).parent, [*passes.__path__, *kernels.__path__]))


def source_files(own: Path, packages: Iterable[str | Path]) -> list[Path]:
    """The modules of ``OWN_FILES`` in ``own``, and every source of the packages, in a fixed order."""
    files = [own / f"{name}.py" for name in OWN_FILES]
    for folder in packages:
        files += sorted(f for f in Path(folder).rglob("*") if f.suffix in (".py", ".cpp", ".h"))
    return files


def digest_of(files: Iterable[Path]) -> str:
    """Names and contents, in the order given."""
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def groups_of(gm: fx.GraphModule) -> list[tuple[str, int | None]]:
    """Process groups the graph names, with their ranks: what lone sums and tiers become depends on them."""
    names = {group_of(n) for n in gm.graph.nodes if n.op == "call_function"} - {""}
    return sorted((name, ranks_of(name)) for name in names)


def device_name(device: torch.device) -> str:
    """``cpu``, or the name of the accelerator, whose kernels differ by model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
