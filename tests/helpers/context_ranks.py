"""Models of several ranks cut from one model, and steps over contexts whose tokens lie on several ranks.

whole, hidden = served_alone(CONFIG, dealt)      what one rank gives for the steps that ``dealt`` makes
on_threads(8, lambda rank: served(part(whole, world(4)), dealt))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from k3compile.runtime.attention import Mla
from k3compile.runtime.cache.writes import clear, copy, poison_all
from k3compile.runtime.config import K3Config
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.ranks import Ranks, world
from rank_parts import part
from small_models import Row, dealt, make_step, small_model
from torch import Tensor

from k3compile.forward import compile_forward
from k3compile.options import CompileOptions

EIGHT = dealt(8, num_hidden_layers=6, attn_res_block_size=4, kda_head_dim=4)
ALONE = Ranks(0, 1, "nobody")  # a model to cut parts from, which is never run


def set_interleave(model: Model, interleave: int) -> None:
    """Deal out runs of ``interleave`` tokens."""
    for layer in model.layers:
        if isinstance(layer.self_attn, Mla):
            layer.self_attn.interleave = interleave


def served(
    model: Model,
    page_size: int,
    steps: Sequence[Sequence[Row]],
    forks: Sequence[tuple[int, int]] = (),
    inner: str | None = None,
) -> list[Tensor]:
    """Hidden states of steps one after the other, over pools that are NaN where nothing was written.

    forks: (slot, new slot) pairs copied before the last step: requests that share what lies before. inner:
    what compiles the layers, one graph a kind.
    """
    rows = [row for step in steps for row in step]
    slots, pages = sorted({row.slot for row in rows}), max(page for row in rows for page in row.pages)
    pools = model.make_pools(max(slots) + 1, pages + 1, page_size, max_drafts=3)
    run = lambda step: model(step, pools)  # noqa: E731
    if inner:
        run = compile_forward(model, pools, CompileOptions(inner=inner), max_requests=8)
    poison_all(pools)
    clear(pools, slots)
    hidden = []
    for number, step in enumerate(steps):
        if forks and number == len(steps) - 1:
            copy(pools, *zip(*forks))
        hidden.append(run(make_step(step))[0])
    if inner:
        assert run.graphs() == len(set(map(model.config.kind, range(model.config.num_hidden_layers))))
    return hidden


def serve_compiled(
    config: K3Config, inner: str, dtype: torch.dtype, page_size: int, steps: Sequence[Sequence[Row]]
) -> list[Tensor]:
    """A job for a pool of ranks: ``served`` by this rank's part of a model, compiled; one context group."""
    with torch.no_grad():
        whole = small_model(config, dtype, ranks=ALONE)
        return served(part(whole, world(dist.get_world_size())), page_size, steps, inner=inner)


def tokens(count: int, seed: int) -> list[int]:
    """So many random tokens."""
    return torch.randint(90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def contexts(
    lengths: Sequence[int],
    page_size: int,
    news: Callable[[int], tuple[int, bool]] = lambda i: (1, False),
) -> list[list[Row]]:
    """Two steps: prompts of ``lengths`` (0: none), then ``news(i)`` = (tokens, verify?) more of each.

    The pages of a request are in no order.
    """
    most = max(lengths) + 64
    each = -(-most // page_size)
    order = torch.randperm(each * len(lengths), generator=torch.Generator().manual_seed(1)) + 1
    first, second = [], []
    for i, (length, pages) in enumerate(zip(lengths, order.view(len(lengths), each).tolist())):
        count, verify = news(i)
        if length:
            first.append(Row(tokens(length, i), i + 1, 0, pages))
        second.append(Row(tokens(count, 100 + i), i + 1, length, pages, verify))
    return [first, second]
