"""States after verified rows in C++ on a CPU, one pass over each; cpu/kda_fold.cpp has the picture."""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from .kda_chunk import Inputs
from .native import library, threads, unwritten

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


@functools.cache
def functions(isa: str | None) -> tuple[ctypes._CFuncPtr, ctypes._CFuncPtr]:
    """The kernels of states and of commits in the library for ``isa``."""
    loaded = library("kda_fold", isa)
    found = loaded.k3_kda_states, loaded.k3_kda_commit
    for kernel in found:
        kernel.argtypes, kernel.restype = [*[POINTER] * 4, INT], None
    return found


def leave_states(
    inputs: Inputs,
    u: Tensor,
    state: Tensor,
    homes: list[int],
    begins: list[int],
    into: list[list[int]],
    isa: str | None = None,
) -> None:
    """The state of request r after its row i -> state(a!)[into[r][i]], float32; u [R, J, H, V].

    As kda_verify_states.leave_in_place. Channels of the state and of u are side by side.
    """
    k, g = (x if x.stride(2) == 1 else x.contiguous() for x in (inputs.k, inputs.g))
    rows, most = len(into), max(map(len, into))
    lists = [*homes, *begins, *map(len, into), *(n for line in into for n in line + [0] * (most - len(line)))]
    unwritten()
    functions(isa)[0](
        (POINTER * 4)(*(x.data_ptr() for x in (k, g, state, u))),
        (INT * 10)(*k.stride()[:2], *g.stride()[:2], *state.stride()[:3], *u.stride()[:3]),
        (INT * 5)(rows, state.shape[1], state.shape[3], state.shape[2], most),
        (INT * len(lists))(*lists),
        threads(),
    )


def commit_states(
    state: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_g: Tensor,
    moves: list[tuple[int, int, int]],
    isa: str | None = None,
) -> None:
    """The states of kda_commit, float32: [L, S, H, V, K] by records [L, N, J, H, *] for checked moves.

    Channels of all four are side by side.
    """
    pools = state, rec_u, rec_k, rec_g
    ordered = sorted(moves, key=lambda move: move[0] == move[2])  # what is copied away goes first
    first = sum(slot != into for slot, _, into in moves)
    strides = [pool.stride(0) for pool in pools] + [n for pool in pools for n in pool.stride()[1:4]]
    layers, _, heads, values, keys = state.shape
    unwritten()
    functions(isa)[1](
        (POINTER * 4)(*(pool.data_ptr() for pool in pools)),
        (INT * 16)(*strides),
        (INT * 7)(layers, len(moves), first, heads, keys, values, max(count for _, count, _ in moves)),
        (INT * (3 * len(moves)))(*(n for move in ordered for n in move)),
        threads(),
    )
