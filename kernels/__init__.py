"""Ops: what the model computes, in plain torch, with implementations beside each meaning.

Importing this package registers every op as ``torch.ops.k3.<name>``.
"""

from . import (
    attn_res,
    conv,
    conv_export,
    conv_scan,
    conv_verify_states,
    kda,
    kda_export,
    kda_scan,
    kda_verify,
    kda_verify_states,
    latent_tail,
    latent_tail_cpu,
    mla,
    mla_block,
    moe,
    mxfp4,
    norm,
    situ,
)
from .op import OPS, Op, Tolerance, acc

__all__ = [
    "OPS",
    "Op",
    "Tolerance",
    "acc",
    "attn_res",
    "conv",
    "conv_export",
    "conv_scan",
    "conv_verify_states",
    "kda",
    "kda_export",
    "kda_scan",
    "kda_verify",
    "kda_verify_states",
    "latent_tail",
    "latent_tail_cpu",
    "mla",
    "mla_block",
    "moe",
    "mxfp4",
    "norm",
    "situ",
]
