"""What a rank is about to serve, as plain data that the ranks compare before their first collective.

    {"versions": {...}, "device": .., "engine": {...}, "compile": {...}, "config": {...}, "checkpoint": {...}}

Everything belongs here that changes a number, a shape, a graph or the order of collectives. Where a rank
finds its files does not: machines may keep them in different places.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from . import __version__, kernels, passes, runtime
from .fingerprint import device_name, digest_of
from .options import read_switches
from .report import Report
from .runtime.config import K3Config
from .runtime.parallel.folders import describe_folder
from .runtime.parallel.sharding import DRAFT, TARGET, WHOLE, split_of
from .runtime.parallel.watch_config import WatchConfig
from .serving import Serving

MOST_BYTES = 32 << 20  # of a parameter that is hashed: K3's router gates, 90 of them, take a few seconds


def statement(
    checkpoint: Path,
    serving: Serving,
    dtype: str,
    resident: str | None,
    compiled: bool,
    patience: WatchConfig,
    device: torch.device,
) -> dict[str, Any]:
    """Names and values, nested. Raises ConfigError (a ValueError) for a model that we do not run."""
    options = serving.options
    compiling: dict[str, Any] = {"compiled": compiled}
    if compiled:
        switches = read_switches()
        compiling |= options.canonical() | {"inductor": dict(options.inductor)}
        compiling |= {"K3_DISABLE": list(switches.disable), "K3_FUEL": switches.fuel}
    return {
        "versions": {
            "k3compile": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "sources": digest_of(sources())[:16],
        },
        "device": kind_of(device),
        **threads_of(device),
        "dtype": dtype,
        "resident": resident or dtype,
        "tp": serving.ranks,
        "dcp": serving.context_ranks,
        "engine": dataclasses.asdict(serving.engine),
        "watch": dataclasses.asdict(patience),
        "features": {name: setting.state for name, setting in serving.settings.items()},
        "compile": compiling,
        "config": dataclasses.asdict(K3Config.from_file(checkpoint)),
        "checkpoint": describe_folder(checkpoint),
        "draft": draft_of(serving.draft),
    }


def draft_of(folder: Path | None) -> dict[str, str]:
    """What there is of a draft, in words where there is none."""
    return {"folder": "no draft"} if folder is None else {"folder": "a draft", **describe_folder(folder)}


def whole_weights(model: torch.nn.Module, draft: torch.nn.Module | None) -> dict[str, dict[str, str]]:
    """Name -> hash of each loaded parameter that every rank holds whole, up to MOST_BYTES: norms, router
    gates, biases. Ranks with the same checkpoint and dtypes have the same; sampled files (folders.py) prove
    it for none of them.
    """
    said = {"weights": (model, TARGET), "weights of the draft": (draft, DRAFT)}
    return {
        title: {
            name: digest(parameter)
            for name, parameter in (holder.named_parameters() if holder is not None else ())
            if split_of(table, name) == WHOLE and parameter.nbytes <= MOST_BYTES
        }
        for title, (holder, table) in said.items()
    }


def computed_by(reports: Iterable[Report]) -> dict[str, list[str]]:
    """What computes each op in some compiled graphs: without a compiler a rank would get other bits."""
    found: dict[str, set[str]] = {}
    for remark in (r for report in reports for r in report.remarks if r.pass_name == "lower"):
        found.setdefault(remark.op, set()).add(remark.reason)
    return {op: sorted(found[op]) for op in sorted(found)}


def digest(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes, wherever it is."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy()).hexdigest()[:16]


def sources() -> list[Path]:
    """Every module of ours, in a fixed order."""
    packages = [Path(__file__).parent, *(Path(p) for one in (kernels, passes, runtime) for p in one.__path__)]
    return [
        file
        for folder in packages
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".py", ".cpp", ".h")
    ]


def threads_of(device: torch.device) -> dict[str, int]:
    """On a CPU a sum is cut by the number of threads; ranks whose sums differ may choose other experts."""
    return {"threads (OMP_NUM_THREADS)": torch.get_num_threads()} if device.type == "cpu" else {}


def kind_of(device: torch.device) -> str:
    """The accelerator's name; of a CPU also what it can do, since kernels are chosen by that."""
    if device.type == "cpu":
        return f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return device_name(device)
