"""How fast a model runs here: eager, plain Inductor, ``plain`` and k3, in one run, beside the limits.

    inductor   Inductor alone: k3 ops are calls of their meaning
    plain      no passes, every op opened before Inductor: what the features are measured against

    prefill    one request, ``prompt`` tokens in one pass          tokens/s, share of the matmul rate
    decode     one request, one token a pass                       tokens/s, share of the read bandwidth:
               the machine's best, and of the weights' own memory in the same rounds
    TTFT       the same prefill with its logits and the argmax     ms
    host       a layer's graph (no replay), one token, tiny widths  µs by kind, arithmetic negligible
    peak       resident memory of the process while the mode ran   MB

All modes share weights and pools; rounds take turns, so a disturbance meets each of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..forward import CompiledForward, compile_forward, null_step, unbacked_rows
from ..options import CompileOptions
from ..runtime.cache.writes import clear
from ..runtime.checkpoint import make_checkpoint
from ..runtime.model import DecoderLayer, Model
from ..runtime.step import Step
from ..runtime.weights import load_model
from .limits import MachineLimits, SameMemory, Sample, interleaved, measure, seconds
from .memory import peak_since

MODES = ("eager", "inductor", "plain", "k3")
RESIDENT = {"float32": torch.float32, "bfloat16": torch.bfloat16}
READ = "a read alone"  # of all weights
PAGE = 64
SLOT = 1  # slot 0 and page 0 belong to nobody
Layer = Callable[..., Tensor]
Forward = Callable[[Step], tuple[Tensor, Tensor]]
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ModeResult:
    """One mode of one model. Samples are seconds a pass."""

    mode: str
    prefill: Sample
    ttft: Sample
    decode: Sample
    host_per_layer: float  # seconds
    peak_bytes: int
    compile_seconds: float


@dataclass(frozen=True)
class ModelResult:
    """All modes of one model, with what its passes must read and compute."""

    name: str
    layers: int
    prompt: int
    decode_bytes: int  # weights one decode token touches, as they are resident
    read_bytes_per_second: float  # of the weights, in the same rounds as decode
    prefill_flops: int  # multiply-adds of the weight matrices over the prompt, times 2
    modes: list[ModeResult] = field(default_factory=list)


def bench(
    presets: Sequence[str],
    modes: Sequence[str] = MODES,
    prompt: int = 512,
    decode: int = 16,
    rounds: int = 5,
    resident: str = "float32",
) -> tuple[MachineLimits, list[ModelResult]]:
    """Measure every preset (or checkpoint directory) in every mode.

    prompt: tokens of the prefill. decode: tokens of one decode round, reported a pass. resident: dtype of the
    matrices in memory; activations are float32. Raises ValueError for an unknown mode or dtype, and for a
    count below 1.
    """
    if resident not in RESIDENT:
        raise ValueError(f"resident is {resident!r} and must be one of {', '.join(RESIDENT)}")
    if unknown := sorted(set(modes) - set(MODES)):
        raise ValueError(f"modes are {', '.join(MODES)} (unknown: {', '.join(unknown)})")
    given = {"prompt": prompt, "decode": decode, "rounds": rounds}
    if small := [f"{name} must be at least 1, got {n}" for name, n in given.items() if n < 1]:
        raise ValueError("; ".join(small))
    limits = measure(side=8192)
    host = host_by_kind(modes)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for preset in presets:
            directory = Path(preset)
            if not directory.is_dir():
                directory = Path(folder) / preset
                make_checkpoint(directory, preset, seed=0)
            model = load_model(directory, resident=RESIDENT[resident])
            results.append(bench_one(preset, model, modes, prompt, decode, rounds, host))
    return limits.or_better(measure(side=8192)), results


@torch.no_grad()
def bench_one(
    name: str,
    model: Model,
    modes: Sequence[str],
    prompt: int,
    decode: int,
    rounds: int,
    host: dict[str, dict[object, float]],
) -> ModelResult:
    """One loaded model."""
    pages = -(-(prompt + decode) // PAGE)
    pools = model.make_pools(SLOT + 1, pages + 1, PAGE)
    passes, compiling, peaks = {}, {}, {}
    for mode in modes:
        with peak_since() as peak:
            forward, logits, compiling[mode] = forward_of(mode, model, pools)
            passes[mode] = Passes(model, pools, forward, prompt, pages, logits)
            passes[mode].prefill()
            passes[mode].decode(1)
        peaks[mode] = peak.bytes
    prefill = interleaved({m: p.prefill for m, p in passes.items()}, rounds)
    ttft = interleaved({m: p.first_token for m, p in passes.items()}, rounds)
    weights = SameMemory(model.parameters())
    runs = {m: (lambda p=p: p.decode(decode)) for m, p in passes.items()}
    decoded = interleaved({**runs, READ: weights}, rounds)
    read = weights.bytes / decoded[READ].median
    kinds = [model.config.kind(i) for i in range(len(model.layers))]
    found = [
        ModeResult(
            mode=mode,
            prefill=prefill[mode],
            ttft=ttft[mode],
            decode=Sample(tuple(value / decode for value in decoded[mode].values)),
            host_per_layer=sum(host[mode][kind] for kind in kinds) / len(kinds),
            peak_bytes=peaks[mode],
            compile_seconds=compiling[mode],
        )
        for mode in modes
    ]
    return ModelResult(
        name, len(kinds), prompt, touched_bytes(model), read, matmul_flops(model, prompt), found
    )


def forward_of(mode: str, model: Model, pools: Sequence) -> tuple[Forward, Logits, float]:
    """What runs a step in ``mode`` and what the head, warmed up, and how long that took in seconds."""
    if mode in ("plain", "k3"):
        forward = compiled(mode, model, pools)
        return forward, forward.logits, forward.seconds
    layer = layer_of(mode)
    forward = partial(model, pools=pools, layer=layer)

    def warm_up() -> None:
        with torch.no_grad(), unbacked_rows():
            forward(null_step(model.place.device))

    return forward, model.logits, 0.0 if mode == "eager" else seconds(warm_up)


def compiled(mode: str, model: Model, pools: Sequence) -> CompiledForward:
    """The model compiled with the features of ``plain`` or ``k3``."""
    return compile_forward(model, pools, CompileOptions(features="plain") if mode == "plain" else None)


def layer_of(mode: str) -> Layer:
    """What runs a layer without us."""
    if mode == "eager":
        return DecoderLayer.forward
    return torch.compile(
        DecoderLayer.forward, backend="inductor", fullgraph=True, dynamic=False, isolate_recompiles=True
    )


class Passes:
    """The passes of one request over a model, run again and again from a cleared state."""

    def __init__(
        self,
        model: Model,
        pools: Sequence,
        forward: Forward,
        prompt: int,
        pages: int,
        logits: Logits | None = None,
    ) -> None:
        self.logits = logits or model.logits
        self.model, self.pools, self.forward, self.prompt = model, pools, forward, prompt
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 256, (prompt,), generator=generator)
        self.table = torch.arange(1, pages + 1).view(1, -1)

    def run(self, tokens: Tensor, seen: int) -> Tensor:
        """Hidden states of ``tokens`` after ``seen`` others."""
        count = len(tokens)
        empty = null_step(self.model.place.device)
        step: Step = empty._replace(
            tokens=tokens,
            spans=torch.tensor([0, count, 0] if count == 1 else [0, 0, count]),
            cu_other=torch.tensor([0, count]),
            slots=torch.tensor([SLOT]),
            seen=torch.tensor([seen]),
            pages=self.table,
        )
        return self.forward(step)[0]

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """The whole prompt in one pass."""
        clear(self.pools, [SLOT])
        return self.run(self.tokens, 0)

    @torch.no_grad()
    def first_token(self) -> Tensor:
        """The prompt, then the token that answers it."""
        return self.logits(self.prefill()[-1:]).argmax(-1)

    @torch.no_grad()
    def decode(self, count: int) -> Tensor:
        """``count`` tokens, each from the one before, after the prompt."""
        token = self.tokens[:1]
        for i in range(count):
            token = self.logits(self.run(token, self.prompt + i)).argmax(-1)
        return token


def host_by_kind(modes: Sequence[str], rounds: int = 30) -> dict[str, dict[object, float]]:
    """Seconds of one call of a layer at one token, by mode and layer kind, on the widths of ``tiny``."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "tiny", "tiny", seed=0)
        model = load_model(Path(folder) / "tiny")
    pools = model.make_pools(SLOT + 1, 2, PAGE)
    kinds = {id(block): model.config.kind(i) for i, block in enumerate(model.layers)}
    found = {}
    for mode in modes:
        times: dict[object, list[float]] = {}
        layer = compiled(mode, model, pools).layer if mode in ("plain", "k3") else layer_of(mode)
        timed = partial(time_layer, layer, kinds, times)
        step = null_step(model.place.device)
        with torch.no_grad(), unbacked_rows():
            model(step, pools, layer=layer)
            for _ in range(rounds):
                model(step, pools, layer=timed)
        found[mode] = {kind: Sample(tuple(values)).median for kind, values in times.items()}
    return found


def time_layer(
    layer: Layer,
    kinds: dict[int, object],
    times: dict[object, list[float]],
    block: DecoderLayer,
    *args: object,
) -> Tensor:
    """Run ``layer`` and keep how long it took under the kind of its block."""
    start = time.perf_counter()
    result = layer(block, *args)
    times.setdefault(kinds[id(block)], []).append(time.perf_counter() - start)
    return result


def touched_bytes(model: Model) -> int:
    """Bytes of the weights that one decode token reads: all, less the experts it does not choose.

    The embedding counts one row.
    """
    total = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        if ".experts." in name:
            size = size * model.config.num_experts_per_token // model.config.num_experts
        elif name == "embed_tokens" and model.lm_head is not None:
            size = parameter[0].numel() * parameter.element_size()
        total += size
    return total


def matmul_flops(model: Model, tokens: int) -> int:
    """2 x weights x tokens over the matrices of the layers; attention and recurrence are not counted."""
    total = 0
    for name, parameter in model.layers.named_parameters():
        if parameter.dim() < 2 or name.endswith(("_scale", "conv_weight")):
            continue
        count = parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
        if ".experts." in name:
            count = count * model.config.num_experts_per_token // model.config.num_experts
        total += count
    return 2 * total * tokens
