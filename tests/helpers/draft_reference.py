"""The DSpark draft once more, token by token and from its description alone: lists, loops, dense attention.

Nothing is cached or batched: each draft is made from the whole sequence. Weights go by their names in the
file, in float64. Also here: a small draft for the small target, filled with noise.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.speculate.dspark_config import DSparkConfig
from k3compile.runtime.speculate.dspark_layout import SHARED, entries
from k3compile.runtime.speculate.dspark_model import DSparkModel

DSPARK_JSON = Path(__file__).parent.parent / "data" / "kimi-k3-dspark-config.json"  # the released draft's


def small_draft_json(target: K3Config, **changes) -> dict:
    """A config.json for a draft of ``target`` whose widths all differ."""
    taps = changes.pop("target_layer_ids", [0, 2, 3])
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 20,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 12,
        "v_head_dim": 6,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
        "num_target_layers": len(taps),
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_layer_ids": taps,
        "mask_token_id": target.vocab_size - 3,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "block_size": 8,
        "torch_dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 32768,
            "rope_theta": 50000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **changes,
    }


def small_draft(target: K3Config, dtype=torch.float64, seed: int = 7, **changes) -> DSparkModel:
    """A filled draft of ``target``."""
    model = DSparkModel(DSparkConfig.from_dict(small_draft_json(target, **changes), target), dtype)
    source = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        gain = "norm" in ".".join(name.split(".")[-2:])
        parameter.copy_(1 + 0.1 * noise if gain else noise * parameter.shape[-1] ** -0.5)
    return model


class Reference:
    """The draft of ``model``, whose target has these embedding and head matrices [V, D]."""

    def __init__(self, model: DSparkModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
        parameters = dict(model.named_parameters())
        self.config, self.embedding, self.head, self.w = model.config, embedding, head, {}
        for entry in entries(model.config):
            if entry.name != SHARED:
                part = parameters[entry.parameter]
                part = part if entry.index is None else part[entry.index]
                self.w[entry.name] = part.double().reshape(entry.shape)

    def norm(self, x, name):
        mean = sum(float(v) ** 2 for v in x) / len(x)
        return x / math.sqrt(mean + self.config.rms_norm_eps) * self.w[name]

    def turned(self, x, position):
        """Pairs (0, 1), (2, 3), .. of x turned by the position times a frequency that YaRN blends."""
        width, y, out = len(x), self.config.yarn, x.clone()
        base = [y.theta ** (-2 * i / width) for i in range(width // 2)]
        turns = [32768 * f / (2 * math.pi) for f in base]  # within the original context
        low = max(math.floor(position_of(32, width, y.theta)), 0)
        high = min(math.ceil(position_of(1, width, y.theta)), width - 1)
        for i, f in enumerate(base):
            assert (turns[i] > 32) == (i < position_of(32, width, y.theta))
            share = min(max((i - low) / (high - low), 0.0), 1.0)
            angle = position * ((1 - share) * f + share * f / 32)
            a, b = float(x[2 * i]), float(x[2 * i + 1])
            out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def row(self, layer, x, position):
        """(latent, turned key) of one token."""
        at, latent = f"layers.{layer}.self_attn", self.config.kv_lora_rank
        both = self.w[f"{at}.kv_a_proj_with_mqa.weight"] @ x
        normed = self.norm(both[:latent], f"{at}.kv_a_layernorm.weight")
        return normed, self.turned(both[latent:], position)

    def attention(self, layer, x, position, rows):
        """One query against every row it may see."""
        at, c = f"layers.{layer}.self_attn", self.config
        down = self.norm(self.w[f"{at}.q_a_proj.weight"] @ x, f"{at}.q_a_layernorm.weight")
        q = (self.w[f"{at}.q_b_proj.weight"] @ down).view(c.num_attention_heads, -1)
        kv_b = self.w[f"{at}.kv_b_proj.weight"].view(c.num_attention_heads, -1, c.kv_lora_rank)
        mscale = 0.1 * math.log(32.0) + 1
        scale = mscale**2 / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
        out = []
        for head in range(c.num_attention_heads):
            nope, pe = q[head, : c.qk_nope_head_dim], self.turned(q[head, c.qk_nope_head_dim :], position)
            scores, values = [], []
            for latent, key in rows:
                kv = kv_b[head] @ latent
                scores.append(float(nope @ kv[: c.qk_nope_head_dim] + pe @ key) * scale)
                values.append(kv[c.qk_nope_head_dim :])
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            out.append(sum(w * v for w, v in zip(weights, values)) / sum(weights))
        return self.w[f"{at}.o_proj.weight"] @ torch.cat(out)

    def hidden(self, taps, anchor, size):
        """taps [n, seen, D] of the committed tokens; the anchor's id -> the K rows after the final norm."""
        c, seen = self.config, taps.shape[1]
        context = [
            self.norm(self.w["context_proj.weight"] @ torch.cat(list(taps[:, t])), "context_norm.weight")
            for t in range(seen)
        ]
        h = [self.embedding[token] for token in [anchor] + [c.mask_token_id] * (size - 1)]
        for i in range(c.num_hidden_layers):
            at = f"layers.{i}"
            x = [self.norm(row, f"{at}.input_layernorm.weight") for row in h]
            rows = [self.row(i, ctx, t) for t, ctx in enumerate(context)]
            rows += [self.row(i, row, seen + k) for k, row in enumerate(x)]
            h = [a + self.attention(i, row, seen + k, rows) for k, (a, row) in enumerate(zip(h, x))]
            x = [self.norm(row, f"{at}.post_attention_layernorm.weight") for row in h]
            gate, up, down = (self.w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            h = [a + down @ (g * torch.sigmoid(g) * (up @ r)) for a, r in zip(h, x) for g in [gate @ r]]
        return [self.norm(row, "final_norm.weight") for row in h]

    def draft(self, taps, anchor, size, choose=lambda logits: int(logits.argmax())):
        """(tokens, logits [K, V], confidences) of one block; ``choose`` draws a token from its logits."""
        before, tokens, logits, confidences = anchor, [], [], []
        for hid in self.hidden(taps, anchor, size):
            markov = self.w["markov_head.markov_w1.weight"][before]
            logits.append(self.head @ hid + self.w["markov_head.markov_w2.weight"] @ markov)
            confidence = self.w["confidence_head.proj.weight"][0] @ torch.cat([hid, markov])
            confidences.append(torch.sigmoid(confidence + self.w["confidence_head.proj.bias"][0]))
            before = choose(logits[-1])
            tokens.append(before)
        return tokens, torch.stack(logits), torch.stack(confidences)


def position_of(turns, width, theta):
    """Where on the scale of frequencies one turns so often within 32768 tokens."""
    return width / 2 * math.log(32768 / (2 * math.pi * turns)) / math.log(theta)
