"""What each pass is worth on this machine: the same model compiled with all passes, and without each one.

    all            every pass of the pipeline
    -latent_tail   all but that one: its time over that of ``all`` is what the pass is worth
    none           no pass; lowering, which decides what computes each op, always runs

Variants share weights and pools and take turns round by round. Sites are counted over all layers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..forward import compile_forward
from ..options import CompileOptions
from ..passes.pipeline import ATEN_PASSES, DYNAMO_PASSES
from ..report import Report
from ..runtime.checkpoint import make_checkpoint
from ..runtime.model import Model
from ..runtime.weights import load_model
from .limits import Sample, interleaved
from .model import PAGE, SLOT, Passes
from .render import spread

ALL, NONE = "all", "none"


@dataclass(frozen=True)
class Variant:
    """One way to compile the model. Samples are seconds a pass over it."""

    name: str
    prefill: Sample
    decode: Sample
    compile_seconds: float


@dataclass(frozen=True)
class PassesResult:
    """All variants of one model. sites: {pass: sites it rewrote, over all layers}; pass_seconds: over all
    kinds."""

    name: str
    inner: str
    prompt: int
    variants: tuple[Variant, ...]
    sites: dict[str, int]
    pass_seconds: dict[str, float]

    def worth(self, variant: Variant) -> tuple[float, float]:
        """Prefill and decode time of ``variant`` over that with all passes: above 1, the pass pays."""
        every = self.variants[0]
        return (
            variant.prefill.median / every.prefill.median,
            variant.decode.median / every.decode.median,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers: seconds with quartiles, ratios to all passes."""
        return {
            "name": self.name,
            "inner": self.inner,
            "prompt_tokens": self.prompt,
            "sites": self.sites,
            "pass_seconds": self.pass_seconds,
            "variants": {
                v.name: {
                    "prefill_seconds": spread(v.prefill),
                    "decode_seconds": spread(v.decode),
                    "compile_seconds": v.compile_seconds,
                    **dict(zip(("prefill_ratio", "decode_ratio"), self.worth(v))),
                }
                for v in self.variants
            },
        }


def pass_names() -> list[str]:
    """The passes of the pipeline, in order."""
    return [p.name for p in (*DYNAMO_PASSES, *ATEN_PASSES)]


def variants_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Variant -> passes it does without."""
    return {ALL: (), **{f"-{name}": (name,) for name in names}, NONE: tuple(pass_names())}


def bench(
    preset: str,
    inner: str = "aot_eager",
    prompt: int = 256,
    decode: int = 16,
    rounds: int = 9,
    passes: Sequence[str] = (),
) -> PassesResult:
    """Measure a preset or a checkpoint directory. passes: those to go without, all when empty.

    Raises ValueError for an unknown pass, and for a count below 1.
    """
    names = list(passes) or pass_names()
    if unknown := sorted(set(names) - set(pass_names())):
        raise ValueError(f"no pass is called {', '.join(unknown)}; passes: {', '.join(pass_names())}")
    given = {"prompt": prompt, "decode": decode, "rounds": rounds}
    if small := [f"{name} must be at least 1, got {n}" for name, n in given.items() if n < 1]:
        raise ValueError("; ".join(small))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(preset)
        if not directory.is_dir():
            directory = Path(folder) / preset
            make_checkpoint(directory, preset, seed=0)
        model = load_model(directory)
    return bench_model(preset, model, inner, prompt, decode, rounds, names)


@torch.no_grad()
def bench_model(
    name: str, model: Model, inner: str, prompt: int, decode: int, rounds: int, names: Sequence[str]
) -> PassesResult:
    """One loaded model."""
    pages = -(-(prompt + decode) // PAGE)
    pools = model.make_pools(SLOT + 1, pages + 1, PAGE)
    runs: dict[str, Passes] = {}
    compiling: dict[str, float] = {}
    reports: list[Report] = []
    for variant, without in variants_of(names).items():
        options = CompileOptions(features=("all", "prefix_cache"), inner=inner, disable=without)
        forward = compile_forward(model, pools, options)
        compiling[variant] = forward.seconds
        reports = reports or forward.reports
        runs[variant] = Passes(model, pools, forward, prompt, pages)
    prefill = interleaved({v: r.prefill for v, r in runs.items()}, rounds)
    decoded = interleaved({v: (lambda r=r: r.decode(decode)) for v, r in runs.items()}, rounds)
    kinds = [model.config.kind(i) for i in range(len(model.layers))]
    layers = [kinds.count(kind) for kind in dict.fromkeys(kinds)]
    return PassesResult(
        name=name,
        inner=inner,
        prompt=prompt,
        variants=tuple(
            Variant(v, prefill[v], Sample(tuple(s / decode for s in decoded[v].values)), compiling[v])
            for v in runs
        ),
        sites={p: sum(r.applied(p) * n for r, n in zip(reports, layers)) for p in names},
        pass_seconds={p: sum(c.seconds for r in reports for c in r.records if c.name == p) for p in names},
    )


def table(result: PassesResult) -> Table:
    """A row a variant, with what the pass it lacks is worth."""
    made = Table(title=f"{result.name} under {result.inner}, prompt {result.prompt}, one request")
    for column in ("variant", "sites", "prefill ms", "decode ms", "prefill worth", "decode worth", "pass s"):
        made.add_column(column, justify="left" if column == "variant" else "right")
    for variant in result.variants:
        lacks = variant.name.removeprefix("-")
        worth = [f"{ratio:.3f}x" for ratio in result.worth(variant)]
        made.add_row(
            variant.name,
            str(result.sites.get(lacks, "")),
            f"{variant.prefill.median * 1e3:.2f}",
            f"{variant.decode.median * 1e3:.2f}",
            *(worth if variant.name != ALL else ["", ""]),
            f"{result.pass_seconds[lacks]:.2f}" if lacks in result.pass_seconds else "",
        )
    return made
