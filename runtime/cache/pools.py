"""The tensors that outlive a step, one set per layer: KDA state by slot, MLA latents by page."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KdaPools(NamedTuple):
    """State of one KDA layer. S slots, of which the first N have records: those that requests live in, none
    where states are not replayed. H heads, K key and V value channels, C = 2HK + HV, J = drafts + 1.
    """

    state: Tensor  # [S, H, V, K] float32 (float64 for a float64 model)
    window: Tensor  # [S, 3, C] the last three raw q|k|v rows, before convolution
    rec_u: Tensor  # [N, J, H, V] corrections of the last verify step
    rec_k: Tensor  # [N, J, H, K] its normalised keys
    rec_g: Tensor  # [N, J, H, K] its log decays, row by row
    rec_x: Tensor  # [N, J, C] its raw q|k|v rows


class MlaPools(NamedTuple):
    """Latents of one MLA layer: B tokens a page, each `kv_lora_rank` latent values and `qk_rope_head_dim`
    more.
    """

    pages: Tensor  # [N, B, kv_lora_rank + qk_rope_head_dim]
