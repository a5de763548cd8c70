"""What a DSpark draft is: the numbers of its ``config.json``, held against the target it drafts for.

    { "model_type": "k3_dspark", "hidden_size": ..., "target_layer_ids": [...], "rope_parameters": {...} }

Embedding and head are the target's, so both models share width and vocabulary. ``block_size`` is a field of
ours: the released file does not say how long a block it was trained for, and is published with 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ConfigError, K3Config, read_config
from ..config_fields import Fields
from .dspark_rope import Yarn

RELEASED_BLOCK = 7
# fmt: off
HARMLESS = frozenset((
    "architectures", "auto_map", "transformers_version", "_torchspec_version", "torch_dtype", "dtype",
    "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache", "initializer_range",
    "_name_or_path", "head_dim",
))
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size",
    "max_position_embeddings", "markov_rank", "target_hidden_size", "target_num_hidden_layers",
)
# fmt: on


@dataclass(frozen=True)
class DSparkConfig:
    """A draft of MLA layers over features of the target. Layers count from 0, of draft and target alike."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    max_position_embeddings: int
    markov_rank: int
    target_hidden_size: int
    target_num_hidden_layers: int
    rms_norm_eps: float
    target_layer_ids: tuple[int, ...]  # the running sum after these layers is what the draft sees
    mask_token_id: int
    block_size: int  # the most tokens it proposes at once
    yarn: Yarn

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], target: K3Config | None = None) -> DSparkConfig:
        """Read a parsed ``config.json``. Raises ConfigError listing every field that cannot be, and every
        size that is not the target's.
        """
        problems: list[str] = []
        values = read(raw, problems)
        problems += contradictions(values)
        if target is not None:
            problems += mismatches(values, target)
        if problems:
            raise ConfigError("this draft", problems)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path, target: K3Config | None = None) -> DSparkConfig:
        """Read ``config.json``, or the one in a directory. Raises ConfigError, also when it is not JSON."""
        return read_config(path, lambda raw: cls.from_dict(raw, target))

    @property
    def head_width(self) -> int:
        """Of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row(self) -> int:
        """Values a token keeps in the pages of one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores."""
        return self.yarn.softmax_scale(self.head_width)


def read(raw: Any, problems: list[str]) -> dict[str, Any]:
    """Values for DSparkConfig; None where unreadable, with a complaint."""
    fields = Fields(raw, "", problems)
    fields.only("model_type", "k3_dspark")
    values: dict[str, Any] = {name: fields.integer(name) for name in SIZES}
    values["rms_norm_eps"] = fields.number("rms_norm_eps")
    values["target_layer_ids"] = fields.integers("target_layer_ids")
    values["mask_token_id"] = fields.integer("mask_token_id", least=0)
    values["block_size"] = fields.integer("block_size", default=RELEASED_BLOCK)
    for name, other in (("num_key_value_heads", "num_attention_heads"), ("draft_vocab_size", "vocab_size")):
        if values[other] is not None:
            fields.only(name, values[other], default=values[other])
    if values["target_layer_ids"] is not None:
        fields.only("num_target_layers", len(values["target_layer_ids"]))
    fields.absent("rope_scaling", "rope_parameters says it")
    fields.only("mla_use_nope", False)
    fields.only("mla_use_output_gate", False, default=False)
    fields.only("hidden_act", "silu", default="silu")
    fields.only("markov_head_type", "vanilla")
    fields.only("enable_confidence_head", True)
    fields.only("confidence_head_with_markov", True)
    values["yarn"] = read_yarn(fields)
    fields.refuse_unknown(HARMLESS)
    return values


def read_yarn(outer: Fields) -> Yarn | None:
    """The section ``rope_parameters``."""
    fields = Fields(outer.get("rope_parameters"), "rope_parameters.", outer.problems)
    if not isinstance(outer.values.get("rope_parameters"), Mapping):
        return None
    fields.only("rope_type", "yarn")
    theta = fields.number("rope_theta")
    if theta is not None:
        outer.only("rope_theta", theta, int(theta), default=theta)
    given = {"theta": theta}
    given["original_max_position_embeddings"] = fields.integer("original_max_position_embeddings")
    for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        given[name] = fields.number(name)
    fields.refuse_unknown(("type",))
    if None in given.values():
        return None
    if given["theta"] <= 1 or given["factor"] < 1 or given["beta_fast"] <= given["beta_slow"]:
        outer.problems.append("rope_parameters need rope_theta > 1, factor >= 1 and beta_fast > beta_slow")
        return None
    return Yarn(**given)


def contradictions(c: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be true of one draft; a value of None was complained about before."""
    ids, depth, vocab = c["target_layer_ids"], c["target_num_hidden_layers"], c["vocab_size"]
    if ids is not None and (not ids or list(ids) != sorted(set(ids)) or ids[0] < 0):
        yield f"target_layer_ids {list(ids)} must be layers from 0, at least one, in rising order"
    elif ids is not None and depth is not None and ids[-1] >= depth:
        yield f"target_layer_ids {list(ids)} go past target_num_hidden_layers {depth}"
    if c["mask_token_id"] is not None and vocab is not None and c["mask_token_id"] >= vocab:
        yield f"mask_token_id {c['mask_token_id']} is outside the vocabulary of {vocab}"
    if c["qk_rope_head_dim"] is not None and c["qk_rope_head_dim"] % 2:
        yield f"qk_rope_head_dim is {c['qk_rope_head_dim']}, and must be even: pairs of values turn"
    if (
        None not in (c["hidden_size"], c["target_hidden_size"])
        and c["hidden_size"] != c["target_hidden_size"]
    ):
        yield (
            f"hidden_size {c['hidden_size']} must be target_hidden_size {c['target_hidden_size']}: "
            "embedding and head are the target's"
        )


def mismatches(c: Mapping[str, Any], target: K3Config) -> Iterator[str]:
    """Sizes that have to be the target's."""
    for name, theirs in (
        ("target_hidden_size", target.hidden_size),
        ("target_num_hidden_layers", target.num_hidden_layers),
        ("vocab_size", target.vocab_size),
    ):
        if c[name] is not None and c[name] != theirs:
            yield f"{name} is {c[name]}, and the target has {theirs}: this draft belongs to another model"
