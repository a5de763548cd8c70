"""A tiny Kimi-Linear of transformers with random weights whose logits differ from token to token."""

from __future__ import annotations

import torch
import transformers
from torch import nn


def kimi_linear(layers: int = 3, seed: int = 0, **changes) -> nn.Module:
    """KDA layers, the last one MLA; the first with a dense MLP, the others with experts. float32, eval."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"],
    }
    config = transformers.KimiLinearConfig(**sizes | changes)
    model = transformers.KimiLinearForCausalLM(config).float().eval()
    with torch.no_grad():  # its own start leaves logits near zero: spread them
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.mul_(5)
            elif "A_log" in name:
                parameter.normal_()
            elif "dt_bias" in name:
                parameter.normal_(-2)
    return model


def prompt(tokens: int, count: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids [count, tokens] without the special ones."""
    return torch.randint(3, 128, (count, tokens), generator=torch.Generator().manual_seed(seed))
