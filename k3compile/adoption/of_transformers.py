"""The four functions of transformers' Kimi-Linear, computed by k3 ops: same arguments, same results.

    chunk_kimi_delta_attention, recurrent_kimi_delta_attention     [B, T, H, *], state [B, H, K, V]
    causal_conv1d_fn, causal_conv1d_update                         [B, C, T], state [B, C, S]

Each is made for the function it stands in for. Where a gradient is wanted that one is called, because the ops
have none; an argument whose meaning would be lost is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.conv import KEPT, TAPS
from ..kernels.op import acc_of
from .scan import refuse, scan, wants_gradient

TOKENS = "k3_tokens"  # how many tokens at the end of a convolution's input are this call's
Function = Callable[..., Any]


def kda_for(theirs: Function) -> Function:
    """For chunk_kimi_delta_attention and recurrent_kimi_delta_attention, which differ in speed alone."""
    name = theirs.__name__

    def kda(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        scale: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """query, key [B, T, H, K], value [B, T, H, V] -> o in the query's dtype, state [B, H, K, V] or None.

        chunk_size is a matter of speed. Raises ValueError for packed sequences (cu_seqlens, seq_idx).
        """
        if wants_gradient(query, key, value, g, beta, initial_state):
            given = {"initial_state": initial_state, "output_final_state": output_final_state}
            return theirs(
                query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **given, **kwargs
            )
        for packed in ("cu_seqlens", "seq_idx"):
            if kwargs.get(packed) is not None:
                raise refuse(name, f"{packed} (several sequences packed in one)")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        state = None if initial_state is None else initial_state.mT
        o, final = scan(query, key, value, g, beta, scale, use_qk_l2norm_in_kernel, state)
        return o.to(query.dtype), final.mT if output_final_state else None

    return kda


def checked_conv(name: str, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The taps [C, 4] in the dtype that k3 keeps sums in. Raises ValueError for another convolution."""
    if weight.shape[-1] != TAPS:
        raise refuse(name, f"a kernel of {weight.shape[-1]} taps, not {TAPS},")
    if bias is not None:
        raise refuse(name, "a bias")
    if activation not in ("silu", "swish"):
        raise refuse(name, f"activation={activation!r}, not 'silu',")
    return acc_of(weight)


def convolved(x: Tensor, taps: Tensor, before: Tensor) -> Tensor:
    """x [B, T, C] after raw tokens before [B, S, C], of which none are zeros -> [B, C, T]."""
    held = before[:, -KEPT:] if before.shape[1] >= KEPT else F.pad(before, (0, 0, KEPT - before.shape[1], 0))
    return torch.ops.k3.conv_scan(x, taps, held)[0].mT


def conv_for(theirs: Function) -> Function:
    """For causal_conv1d_fn."""

    def conv(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [B, C, S + T], of which the first S are of earlier calls -> [B, C, T].

        Raises ValueError for a bias, another width or activation, packed sequences.
        """
        if wants_gradient(hidden_states, weight, bias):
            return theirs(hidden_states, weight, bias, activation, **kwargs)
        if kwargs.get("seq_idx") is not None or kwargs.get("cu_seqlens") is not None:
            raise refuse("causal_conv1d_fn", "seq_idx or cu_seqlens (several sequences packed in one)")
        taps = checked_conv("causal_conv1d_fn", weight, bias, activation)
        x = hidden_states.mT
        earlier = x.shape[1] - kwargs.get(TOKENS, x.shape[1])
        return convolved(x[:, earlier:], taps, x[:, :earlier])

    return conv


def conv_update_for(theirs: Function) -> Function:
    """For causal_conv1d_update."""

    def update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [B, C, T], conv_state(a!) [B, C, S], S at least 3 -> [B, C, T].

        Raises ValueError for a bias, another width or activation.
        """
        if wants_gradient(hidden_states, conv_state, weight, bias):
            return theirs(hidden_states, conv_state, weight, bias, activation)
        taps = checked_conv("causal_conv1d_update", weight, bias, activation)
        x, before = hidden_states.mT, conv_state.mT
        y = convolved(x, taps, before.to(x.dtype))
        conv_state.copy_(torch.cat([before, x], 1)[:, -conv_state.shape[2] :].mT)
        return y

    return update
