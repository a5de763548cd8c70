"""All of the check in one run, as JSON; on a GPU, or interpreted on a CPU without the times.

    {"schema": "k3gpu/1", "mode": "gpu" or "interpreted", "passed": .., "seconds": .., "not_reached": [..],
     "card", "target", "part", "driver", "torch", "triton", "k3compile": what it ran on and with
     "ops":   [{"op", "provider", "dtype", "calls", "refused": {reason: calls}, "ratio": error over the
                meaning's, at most 1.1, "worst": largest error over the tolerance, "complaints": [..]}],
     "cells": [{"cell", "ms", "gb_per_s", "tflop_per_s", "roofline_us", "of_roofline", "worst", "ratio",
                "complaints": [..]}],
     "model": {"prompts", "same", "tie", "wrong": [..], "graphs", "compile_seconds", "choices": {op: [..]}}}

A kernel that fails is a complaint, and the run goes on; what the time was too short for is in not_reached.
One that is not for this GPU is no complaint: its entry has "skipped", the reason, and nothing else.
Interpreted kernels compute in float32 alone: Triton's interpreter does not round to bfloat16.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .. import __version__
from ..aot.cells import every_cell
from ..kernels.jit_triton import interpreting
from ..kernels.op import OPS, Op
from . import cells_triton, exactness, model, poison

SCHEMA = "k3gpu/1"
SECONDS, INTERPRETED_SECONDS = 240.0, 3600.0  # after which nothing new is begun
POISONED = 2  # calls of each op, the smallest
Say = Callable[[str], None]


@dataclass
class Run:
    """How far a run has come. steps: how many things there are to do."""

    steps: int
    seconds: float
    say: Say
    started: float = field(default_factory=time.perf_counter)
    begun: int = 0
    not_reached: list[str] = field(default_factory=list)

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.started

    def reached(self, what: str) -> bool:
        """Whether there is time for it, which is said; if not, it is noted."""
        if self.elapsed > self.seconds:
            self.not_reached.append(what)
            return False
        self.begun += 1
        self.say(f"{self.elapsed:.0f} s, {self.begun} of {self.steps}: {what}")
        return True


def with_triton(match: str) -> list[tuple[Op, str]]:
    """Ops and their implementations in Triton, where the op's name has ``match``."""
    every = [(op, provider) for op in OPS.values() for provider in op.implementations]
    return [(op, provider) for op, provider in every if provider.startswith("triton") and match in op.name]


def guarded(work: Callable[[], dict[str, Any]], **who: Any) -> dict[str, Any]:
    """What ``work`` returns; whatever it raises is a complaint, for one kernel must not end the others."""
    try:
        return work()
    except Exception as error:  # a compiler, a driver or a kernel: all of them are findings
        lines = str(error).strip().splitlines() or [""]
        return who | {"complaints": [f"{type(error).__name__}: {lines[-1]}"]}


def check_op(op: Op, provider: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The error rule and the poison of one op, or why it is none for here."""
    if why := cells_triton.not_for_here(cells_triton.targets_of(op.name, provider)):
        return {"op": op.name, "provider": provider, "dtype": str(dtype), "skipped": why, "complaints": []}
    found = exactness.check(op, provider, dtype, device=device)
    small = sorted(poison.calls(op, dtype), key=poison.numbers)[:POISONED]
    for args in small:
        found.wrong += poison.check(op, provider, args, dtype, device).complaints
    if not found.calls:
        found.wrong.append("no sample of the op is one that it takes")
    return found.to_json()


def run(
    device: str, match: str = "", seconds: float = SECONDS, with_model: bool = True, say: Say = print
) -> dict[str, Any]:
    """The whole check. device: cuda; cpu where Triton is interpreted, which times nothing.

    match: only ops and calls whose name has this.
    """
    on_gpu = device == "cuda"
    dtypes = (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,)
    ops = [(op, provider, dtype) for op, provider in with_triton(match) for dtype in dtypes]
    cells = [c for c in every_cell() if c.provider.startswith("triton") and match in c.name] if on_gpu else []
    todo = Run(len(ops) + len(cells) + with_model, seconds, say)
    made: dict[str, Any] = {"schema": SCHEMA, "mode": "gpu" if on_gpu else "interpreted", **machine(device)}
    made["ops"] = [
        guarded(
            partial(check_op, op, provider, dtype, device), op=op.name, provider=provider, dtype=str(dtype)
        )
        for op, provider, dtype in ops
        if todo.reached(f"{op.name} {provider} {dtype}")
    ]
    if with_model and todo.reached("the trained tiny model, compiled"):
        inner = "inductor" if on_gpu else "eager"
        made["model"] = guarded(partial(check_model, device, inner, say))
    if on_gpu:
        part = cells_triton.part_here()
        made["cells"] = [
            guarded(partial(cells_triton.measure, cell, part), cell=cell.name)
            for cell in cells
            if todo.reached(cell.name)
        ]
    made["not_reached"] = todo.not_reached
    made["passed"] = not complaints(made)
    made["seconds"] = todo.elapsed
    return made


def check_model(device: str, inner: str, say: Say) -> dict[str, Any]:
    """The model; interpreted it answers one short prompt, for a program of a kernel is then Python."""
    if device == "cuda":
        return model.check(device, inner, say=say)
    return model.check(device, inner, of_each=1, tasks=("sum",), most_tokens=2, say=say)


def complaints(made: dict[str, Any]) -> list[str]:
    """Everything that is wrong, a line each; nothing is a pass."""
    lines = [f"{o['op']} {o.get('dtype', '')}: {c}" for o in made["ops"] for c in o["complaints"]]
    lines += [f"{c['cell']}: {line}" for c in made.get("cells", ()) for line in c["complaints"]]
    of_model = made.get("model", {})
    lines += [f"model: {line}" for line in (*of_model.get("wrong", ()), *of_model.get("complaints", ()))]
    return lines + [f"no time was left for {what}" for what in made["not_reached"]]


def machine(device: str) -> dict[str, Any]:
    """The card and the versions; without a GPU there is no card."""
    found = {"card": None, "target": None, "part": None, "driver": None}
    if device == "cuda":
        part = cells_triton.part_here()
        found = {
            "card": torch.cuda.get_device_name(),
            "target": part and part.target,
            "part": part and part.name,
            "driver": driver(),
        }
    return found | {
        "torch": torch.__version__,
        "triton": cells_triton.triton_version(),
        "k3compile": __version__,
    }


def driver() -> str | None:
    """The GPU driver's version, where a tool of its maker tells it."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return said[0] if said else None


def interpreted(match: str, seconds: float, with_model: bool) -> dict[str, Any]:
    """The check in a process whose Triton interprets. Raises RuntimeError where that ends badly."""
    asked = json.dumps({"match": match, "seconds": seconds, "with_model": with_model})
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "k3compile.gpu_check.run", asked]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the interpreting process ended with code {ended.returncode}")
    return json.loads(ended.stdout)


def only_triton() -> None:
    """Leave no other implementation to choose, as it is on a GPU, where those for a CPU refuse."""
    for op in OPS.values():
        op.implementations = {n: i for n, i in op.implementations.items() if n.startswith("triton")}


if __name__ == "__main__":
    from .interpreter_triton import improve

    improve()
    only_triton()
    with interpreting():
        result = run("cpu", **json.loads(sys.argv[1]), say=lambda line: print(line, file=sys.stderr))
    print(json.dumps(result))
