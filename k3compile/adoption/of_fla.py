"""fla's chunk_kda and fused_recurrent_kda, computed by k3 ops: [B, T, H, *], state [N, H, K, V].

The gate, the sigmoid of beta and the norm of queries and keys that fla can do in its kernel are done before
the op; packed sequences are the rows of kda_prefill. Where a gradient is wanted fla's own function is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.op import acc, acc_of
from .scan import refuse, scan, wants_gradient

HINTS = {"disable_recompute", "cu_seqlens_cpu", "safe_gate", "chunk_size", "max_num_seqs"}  # speed only
Function = Callable[..., Any]


def kda_for(theirs: Function) -> Function:
    """For fla's chunk_kda and fused_recurrent_kda: arguments by the places of the installed function."""
    name, places = theirs.__name__, list(inspect.signature(theirs).parameters)

    def kda(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """q, k [B, T, H, K], v [B, T, HV, V], HV a multiple of H -> o, state [N, HV, K, V] or None.

        Raises ValueError for what would be lost: cp_context, use_graph, return_intermediate_states, and
        whatever is not known.
        """
        given = dict(zip(places, args)) | kwargs
        if wants_gradient(*given.values()):
            return theirs(*args, **kwargs)
        return run(name, **{n: x for n, x in given.items() if n not in HINTS})

    return kda


def run(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """One of fla's KDA functions, whose hints are dropped."""
    lost = [f"{n}={x!r}" for n, x in others.items() if x is not None and x is not False]
    if lost:
        raise refuse(name, ", ".join(lost))
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    if use_gate_in_kernel:
        g = gate(g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(acc_of(beta)) * (2.0 if allow_neg_eigval else 1.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    v_first = state_v_first or transpose_state_layout
    state = initial_state if initial_state is None or v_first else initial_state.mT
    o, final = scan(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, state, cu_seqlens)
    return o, (final if v_first else final.mT) if output_final_state else None


def gate(f: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """fla's gate inside the kernel: f [B, T, H, K] -> log decay, acc. Without a_log the rate is 1."""
    heads, width, wide = f.shape[2], f.shape[3], acc(f.dtype)
    a_log = f.new_zeros(heads, dtype=wide) if a_log is None else a_log.flatten().to(wide)
    dt_bias = f.new_zeros(heads * width, dtype=wide) if dt_bias is None else dt_bias.flatten().to(wide)
    return torch.ops.k3.kda_decay(f.flatten(0, 1), a_log, dt_bias, lower_bound or 0.0).view(f.shape)
