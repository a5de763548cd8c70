"""Master weights, what a pass sees of them, and what is written.

master float32  --bf16, experts MXFP4-->  seen bfloat16  --gradients straight through-->  master
                --the same rounding---->  file           so the file loses nothing
"""

from __future__ import annotations

import dataclasses

import torch
from k3compile.kernels.mxfp4 import GROUP, unpack
from k3compile.runtime.config import K3Config
from k3compile.runtime.model import Model
from torch import Tensor

KEPT = ("conv_weight", "a_log", "dt_bias", "o_norm", "e_score_correction_bias")  # float32 in the file too
OUTWARD = ("o_proj", "down_proj", "routed_expert_up_proj", "w2")  # matrices that write to the running sum
LOOKING = ("qkv_proj.weight", "conv_weight", "dt_bias")


def shapes(config: K3Config) -> dict[str, torch.Size]:
    """Name -> shape of every trained tensor: Model's parameters, experts unpacked."""
    dense = dataclasses.replace(config, experts_packed=False)
    return {name: value.shape for name, value in Model(dense, device="meta").named_parameters()}


def initial(config: K3Config, seed: int) -> dict[str, Tensor]:
    """Random master weights: every sub-layer starts near what it gets, and the depth mix starts even."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(config).items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        normal = torch.randn(shape, generator=random)
        if leaf.endswith("norm") or name == "norm.weight" or name.endswith("q_proj.1.weight"):
            made[name] = torch.ones(shape)
        elif leaf in ("proj", "e_score_correction_bias", "a_log"):
            made[name] = torch.zeros(shape)
        elif leaf == "conv_weight":
            made[name] = 0.3 * normal + torch.tensor([0.0, 0.0, 0.0, 0.7])
        elif leaf == "dt_bias":  # channels that forget at once beside channels that keep
            made[name] = 1.5 * normal - 3
        else:
            gain = 0.5 if leaf in OUTWARD or leaf in ("embed_tokens", "lm_head") else 1.0
            made[name] = gain * normal * (1.0 if leaf == "embed_tokens" else shape[-1] ** -0.5)
    for layer in config.kda_layers:
        look_back(config, {n: made[f"layers.{layer}.self_attn.{n}"] for n in LOOKING})
    return made


def look_back(config: K3Config, own: dict[str, Tensor]) -> None:
    """Most heads of a layer begin as what would be found anyway, after some hundred steps: look up the token
    here, or one or two places back, among those that stood one place before each token of the past.
    """
    heads, width = config.kda_num_heads, config.kda_head_dim
    qkv = own["qkv_proj.weight"].view(3, heads, width, -1)
    conv = own["conv_weight"].view(3, heads, width, 4)
    keeps = own["dt_bias"].view(heads, width)
    for head in range(heads * 3 // 4):
        back = head % 3
        qkv[1, head] = qkv[0, head]
        conv[:2, head] *= 0.3
        conv[0, head, :, 3 - back] += 1.0
        conv[1, head, :, 2 - back] += 1.0
        conv[:2, head, :, 3] -= 0.2
        keeps[head] = keeps[head] / 3 - 6


def seen(master: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What a pass works with: values of the file. Leaves, of which gradients are taken."""
    out = {}
    for name, value in master.items():
        if name.endswith(KEPT):
            out[name] = value.clone()
        elif ".experts." in name:
            out[name] = mxfp4(value).to(dtype)
        else:
            out[name] = value.to(torch.bfloat16).to(dtype)
        out[name].requires_grad_(not name.endswith("e_score_correction_bias"))
    return out


def unpacked(model: Model) -> dict[str, Tensor]:
    """The weights of a loaded model as training names them."""
    weights = dict(model.named_parameters())
    for name in [n for n in weights if ".experts." in n and not n.endswith("_scale")]:
        weights[name] = unpack(weights[name], weights.pop(f"{name}_scale"), model.place.dtype)
    return weights


def mxfp4(w: Tensor) -> Tensor:
    """w float32 [..., n] -> the values that packing and unpacking would give, bit for bit."""
    grouped = w.unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 3, 0)
    units = torch.ldexp(grouped, -exponent)
    size = units.abs()
    fine, coarse = (size * 2).round() / 2, (size / 2).round().clamp(max=3.0) * 2
    code = torch.where(size < 2, fine, torch.where(size < 4, size.round(), coarse))
    return torch.ldexp(code.copysign(units), exponent).flatten(-2)
