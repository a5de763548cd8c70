"""Our eager layers and their ONNX graphs on the same rectangle of tokens and the same state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from k3compile.runtime.cache.pools import KdaPools
from k3compile.runtime.model import Model
from small_models import Row, make_step
from torch import Tensor

PAGE = 4


class Case(NamedTuple):
    """B sequences of T tokens, S tokens before them, and the feeds that say the same to ONNX."""

    sequences: int
    tokens: int
    seen: int
    pools: list
    rows: list[Row]
    ids: Tensor  # [B, T]
    feeds: dict[str, np.ndarray]


def case(model: Model, sequences: int, tokens: int, seen: int, seed: int = 1) -> Case:
    """Random tokens and random state in every pool."""
    draw = torch.Generator().manual_seed(seed)
    pages_each = -(-(seen + tokens) // PAGE)
    pools = model.make_pools(sequences + 1, sequences * pages_each + 1, PAGE)
    ids = torch.randint(0, 80, (sequences, tokens), generator=draw)
    slots, feeds = list(range(1, sequences + 1)), {}
    tables = [list(range(1 + i * pages_each, 1 + (i + 1) * pages_each)) for i in range(sequences)]
    for index, pool in enumerate(pools):
        name = f"layers.{index}"
        if isinstance(pool, KdaPools):
            pool.state.copy_(torch.randn(pool.state.shape, generator=draw) * 0.3)
            pool.window.copy_(torch.randn(pool.window.shape, generator=draw))
            feeds[f"{name}.state"] = array(pool.state[slots].mT)
            feeds[f"{name}.window"] = array(pool.window[slots].mT)
        else:
            pool.pages.copy_(torch.randn(pool.pages.shape, generator=draw))
            feeds[f"{name}.latents"] = array(latents(pool.pages, tables, seen))
    rows = [Row(ids[i].tolist(), slots[i], seen, tables[i]) for i in range(sequences)]
    return Case(sequences, tokens, seen, pools, rows, ids, feeds)


def latents(pages: Tensor, tables: list[list[int]], count: int) -> Tensor:
    """The first ``count`` rows of every sequence, [B, count, L + r]."""
    return torch.stack([pages[table].flatten(0, 1)[:count] for table in tables])


def array(x: Tensor) -> np.ndarray:
    """A copy that the pools' later writes do not reach."""
    return np.array(x.detach().numpy(), order="C")


def run_onnx(model, feeds: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The reference evaluator's outputs by name."""
    from onnx.reference import ReferenceEvaluator

    wanted = {i.name for i in model.graph.input}
    outputs = ReferenceEvaluator(model).run(None, {k: v for k, v in feeds.items() if k in wanted})
    return {o.name: torch.from_numpy(np.array(v)) for o, v in zip(model.graph.output, outputs)}


def state_after(case: Case, index: int) -> dict[str, Tensor]:
    """What the pools of a layer hold for the sequences, in ONNX's layouts and names."""
    pool, name, slots = case.pools[index], f"layers.{index}", [r.slot for r in case.rows]
    if isinstance(pool, KdaPools):
        found = {"present_state": pool.state[slots].mT, "present_window": pool.window[slots].mT}
    else:
        tables = [list(r.pages) for r in case.rows]
        found = {"present_latents": latents(pool.pages, tables, case.seen + case.tokens)}
    return {f"{name}.{key}": value for key, value in found.items()}


def eager_layer(model: Model, case: Case, index: int, p: Tensor, blocks: Tensor) -> Tensor:
    """p [B, T, D], blocks [n, B, T, D] through one of our layers; advances the pools."""
    width = p.shape[-1]
    flat = blocks.reshape(len(blocks), -1, width)
    step = make_step(case.rows)
    return model.layers[index](p.reshape(-1, width), flat, case.pools[index], step).view(p.shape)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Equal relative to the largest wanted value."""
    assert got.shape == want.shape
    worst = (got - want).abs().max() / want.abs().max().clamp(min=1e-30)
    assert worst <= tolerance, f"{worst:.1e}"
