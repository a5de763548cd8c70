"""Runs the latent tail on two gloo ranks, each with holes for the other's experts; a script for a test.

python tail_on_two_ranks.py FOLDER          prints what the pass said on rank 0
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from latent_tails import EPS, k3_norm, make_args, tail, where_after

from k3compile import report
from k3compile.entry import k3


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    group = dist.group.WORLD.group_name
    plain = tail(where_after, k3_norm, group=group)
    compiled = torch.compile(plain, backend=k3, options={"inner": "aot_eager", "require": {"latent_tail": 1}})
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        whole = make_args(dtype, tokens=7, top_k=4)
        mine = whole._replace(
            idx=torch.where(whole.idx % 2 == rank, whole.idx, -1),  # every other row lives here
            shared=whole.shared / 2,
        )
        want = torch.ops.k3.latent_tail(*whole, EPS, "")
        with torch.no_grad():
            torch.testing.assert_close(compiled(*mine), want, rtol=bound, atol=bound)
    if rank == 0:
        print(*(r.detail for r in report.latest().remarks if r.pass_name == "latent_tail"))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
