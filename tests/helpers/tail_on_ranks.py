"""Runs the latent tail on gloo ranks, each with holes for the others' experts; a script for a test.

python tail_on_ranks.py RANKS INNER FOLDER          prints, as JSON, what rank 0 was told

Every rank compiles the same plain tail once for all row counts and, in float64, with each tier by name. Ranks
that differ in a bit, or from one rank in float64, end it with an error. Inductor computes float32 alone.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from latent_tails import EPS, Args, k3_norm, make_args, part, summed, tail, where_after

from k3compile import report
from k3compile.entry import k3

TIERS = ("fused", "overlap", "column")
BOUNDS = ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2))
ROWS = (7, 129, 257)  # one number of each tier


def compiled(group: str, inner: str, lower: str | dict[str, str]):
    """The plain tail over ``group`` behind the backend."""
    plain = tail(where_after, k3_norm, group=group)

    def forward(rows, w, idx, norm_w, up_w, shared):
        torch._check(w.shape[0] == idx.shape[0])
        torch._check(shared.shape[0] == idx.shape[0])
        return plain(rows, w, idx, norm_w, up_w, shared)

    options = {"inner": inner, "require": {"latent_tail": 1}, "lower": lower}
    return torch.compile(forward, backend=k3, options=options, dynamic=True)


def check(call, parts: list[Args], rank: int, bound: float) -> None:
    """One call of this rank: near to what one rank computes in float64, and the bits that every rank has."""
    want = torch.ops.k3.latent_tail(*summed(parts), EPS, "")
    with torch.no_grad():
        got = call(*parts[rank])
    assert (got.double() - want).norm() <= bound * want.norm(), (got, want)
    everyone = [torch.empty_like(got) for _ in parts]
    dist.all_gather(everyone, got)
    assert all(torch.equal(got, other) for other in everyone), "ranks differ"


def work(rank: int, ranks: int, inner: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD.group_name
    for dtype, bound in BOUNDS if inner != "inductor" else BOUNDS[1:2]:
        named = TIERS if dtype == torch.float64 else ()
        for tier, rows in {"auto": ROWS, **dict.fromkeys(named, ROWS[:1])}.items():
            torch._dynamo.reset()
            call = compiled(group, inner, "auto" if tier == "auto" else {"latent_tail": tier})
            for tokens in rows:
                whole = make_args(dtype, tokens, top_k=4, width=8 * ranks, holes=True, poison=True)
                check(call, [part(whole, r, ranks) for r in range(ranks)], rank, bound)
            said = [r.reason for r in report.latest().remarks if r.op.startswith("k3.latent_tail")]
            if rank == 0:
                print(json.dumps([str(dtype), tier, said]))
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1])
    mp.spawn(work, (count, *sys.argv[2:4]), count)
