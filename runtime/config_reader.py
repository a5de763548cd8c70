"""From the released ``config.json`` to the values of a K3Config, with every complaint collected.

A field we have no code for may change what the model computes, so an unknown name is a complaint too. The
names below are written by Hugging Face tools and change no logit; ``head_dim`` and ``rope_theta`` are derived
there from unrelated numbers and are never used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_fields import Fields

# fmt: off
HARMLESS = frozenset((
    "_name_or_path", "architectures", "auto_map", "transformers_version", "use_cache", "initializer_range",
    "return_dict", "return_dict_in_generate", "output_hidden_states", "output_attentions", "output_scores",
    "output_router_logits", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "cross_attention_hidden_size",
    "add_cross_attention", "tie_encoder_decoder", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "finetuning_task", "id2label", "label2id", "tokenizer_class", "prefix", "sep_token_id",
    "decoder_start_token_id", "task_specific_params", "problem_type", "attn_implementation",
    "_attn_implementation", "head_dim", "rope_theta", "attention_dropout", "pretraining_tp",
    "media_placeholder_token_id", "image_placeholder", "video_placeholder", "ignore_index", "vision_config",
))
# fmt: on

NAMED = 100  # layers that a message names, at most, beside those that the lists hold


def read(raw: Any) -> tuple[dict[str, Any], list[str]]:
    """Values for K3Config (None where unreadable, ``latent_norm_eps`` left out) and the complaints."""
    problems: list[str] = []
    outer = Fields(raw, "", problems)
    family = outer.only("model_type", "kimi_k3", "kimi_linear")
    if family == "kimi_k3":
        text = Fields(outer.get("text_config"), "text_config.", problems)
        text.only("model_type", "kimi_linear", default=None)
    else:
        text = outer
    values = {"family": family, **read_sizes(text), **read_mla(text), **read_kda(text), **read_ffn(text)}
    values |= read_shared(text, outer)
    check_fixed(text)
    for fields in {id(text): text, id(outer): outer}.values():
        fields.refuse_unknown(HARMLESS)
    return values, problems


def read_sizes(text: Fields) -> dict[str, Any]:
    """Widths, depth, norms, activation, residual."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    values: dict[str, Any] = {name: text.integer(name) for name in names}
    values["rms_norm_eps"] = text.number("rms_norm_eps")
    longest = text.integer("model_max_length", default=0)
    values["max_position_embeddings"] = text.integer("max_position_embeddings", default=longest or 1 << 20)
    values["attn_res_block_size"] = text.integer("attn_res_block_size", default=0)
    values["situ_beta"] = text.number("activation_situ_beta", default=0.0)
    values["situ_linear_beta"] = text.number("activation_situ_linear_beta", default=0.0)
    activation = text.only("hidden_act", "situ", "silu")
    if activation and values["situ_beta"] is not None and (activation == "situ") != bool(values["situ_beta"]):
        text.problems.append(
            f"{text.where}hidden_act is {activation!r} but activation_situ_beta says otherwise"
        )
    return values


def read_mla(text: Fields) -> dict[str, Any]:
    """The latent attention."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    values: dict[str, Any] = {name: text.integer(name) for name in names}
    values["q_lora_rank"] = text.integer("q_lora_rank", default=0)
    values["mla_use_output_gate"] = text.flag("mla_use_output_gate", default=False)
    if values["num_attention_heads"] is not None:
        heads = values["num_attention_heads"]
        text.only("num_key_value_heads", heads, default=heads)
    return values


def read_kda(text: Fields) -> dict[str, Any]:
    """The linear attention and the two layer lists, which count from 1."""
    depth = text.values.get("num_hidden_layers")
    linear = Fields(text.get("linear_attn_config"), f"{text.where}linear_attn_config.", text.problems)
    if not isinstance(text.values.get("linear_attn_config"), Mapping):
        return dict.fromkeys(("kda_layers", "kda_num_heads", "kda_head_dim", "gate_lower_bound"), None) | {
            "use_full_rank_gate": None
        }
    kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if kda is not None and full is not None and type(depth) is int:
        check_layer_lists(linear, kda, full, depth)
    linear.only("short_conv_kernel_size", 4)
    bound = linear.get("gate_lower_bound", default=0.0)
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        bound = linear.complain("gate_lower_bound", bound, "a negative number or absent")
    values = {
        "kda_layers": None if kda is None else tuple(sorted(i - 1 for i in kda)),
        "kda_num_heads": linear.integer("num_heads"),
        "kda_head_dim": linear.integer("head_dim"),
        "gate_lower_bound": bound if bound is None else float(bound),
        "use_full_rank_gate": linear.flag("use_full_rank_gate", default=False),
    }
    linear.refuse_unknown(())
    return values


def check_layer_lists(linear: Fields, kda: tuple[int, ...], full: tuple[int, ...], depth: int) -> None:
    """Each layer from 1 to ``depth`` has to stand once, in one of the two lists."""
    both = sorted(kda + full)
    upto = min(depth, len(both) + NAMED)  # a mistyped depth may be of any size, and leaves out most of it
    wrong = {
        "counts from 1, but a list holds": [i for i in both if i < 1],
        f"goes past num_hidden_layers {depth} with": [i for i in both if i > depth],
        "names twice": sorted({i for i in both if both.count(i) > 1}),
        "leaves out": sorted(set(range(1, upto + 1)) - set(both)),
    }
    for what, layers in wrong.items():
        if layers:
            linear.problems.append(f"{linear.where}kda_layers + full_attn_layers {what} {layers}")


def read_ffn(text: Fields) -> dict[str, Any]:
    """Dense layers, router and experts."""
    names = ("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size")
    values: dict[str, Any] = {name: text.integer(name) for name in names}
    values["first_k_dense_replace"] = text.integer("first_k_dense_replace", least=0)
    values["moe_layer_freq"] = text.integer("moe_layer_freq", default=1)
    values["routed_expert_hidden_size"] = text.integer("routed_expert_hidden_size", default=0)
    values["moe_renormalize"] = text.flag("moe_renormalize", default=True)
    values["routed_scaling_factor"] = text.number("routed_scaling_factor", default=1.0)
    latent = values["routed_expert_hidden_size"]
    if latent is not None:
        text.only("latent_moe_use_norm", bool(latent), default=bool(latent))
    return values


def check_fixed(text: Fields) -> None:
    """Fields of which we run one value only."""
    text.only("mla_use_nope", True)
    text.only("moe_router_activation_func", "sigmoid", default="sigmoid")
    text.only("topk_method", "noaux_tc", default="noaux_tc")
    text.only("num_expert_group", 1, default=1)
    text.only("topk_group", 1, default=1)
    text.flag("use_grouped_topk", default=True)
    text.only("num_nextn_predict_layers", 0, default=0)
    text.only("attention_bias", False, default=False)
    text.only("mlp_bias", False, default=False)
    text.absent("rope_scaling", "the model has no positional encoding")
    text.absent("sliding_window", "attention is global")


def read_shared(text: Fields, outer: Fields) -> dict[str, Any]:
    """Fields that the wrapper may repeat. The text model's own value is the one that counts."""
    values: dict[str, Any] = {}
    for name in ("bos_token_id", "pad_token_id"):
        source = text if text.values.get(name) is not None else outer
        values[name] = source.integer(name, least=0)
        agree(name, text, outer)
    source = text if text.values.get("eos_token_id") is not None else outer
    eos = source.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [eos]
    good = bool(eos) and all(type(one) is int for one in eos)
    if not good and eos != [None]:
        source.complain("eos_token_id", eos, "a token id or a list of them")
    values["eos_token_ids"] = tuple(eos) if good else None
    agree("eos_token_id", text, outer)
    inner_tie = text.flag("tie_word_embeddings", default=None)
    outer_tie = outer.flag("tie_word_embeddings", default=None)
    # A wrapper's flag is often a library default, so it only counts where the text model is silent.
    values["tie_word_embeddings"] = bool(outer_tie if inner_tie is None else inner_tie)
    values["dtype"] = read_dtype(text, outer)
    values["experts_packed"] = read_quantization(text, outer)
    return values


def agree(name: str, text: Fields, outer: Fields) -> None:
    """Complain when wrapper and text model give different values."""
    text.asked.add(name)
    outer.asked.add(name)
    given = [fields.values.get(name) for fields in (text, outer)]
    if None not in given and given[0] != given[1]:
        text.problems.append(f"{name} is {given[0]!r} in {text.where} and {given[1]!r} outside it")


def read_dtype(text: Fields, outer: Fields) -> str | None:
    """The dtype the checkpoint is stored in; older files call it ``torch_dtype``."""
    found = None
    for fields in (outer, text):
        for name in ("torch_dtype", "dtype"):
            found = fields.only(name, "bfloat16", "float16", "float32", default=found)
    return found or "bfloat16"


def read_quantization(text: Fields, outer: Fields) -> bool:
    """True when the experts are MXFP4. The release nests the section in the text config."""
    agree("quantization_config", text, outer)
    holder = text if text.values.get("quantization_config") is not None else outer
    raw = holder.values.get("quantization_config")
    if raw is None:
        return False
    where = f"{holder.where}quantization_config."
    scheme = Fields(raw, where, text.problems)
    scheme.only("quant_method", "compressed-tensors")
    scheme.only("format", "mxfp4-pack-quantized")
    scheme.only("quantization_status", "compressed", default="compressed")
    scheme.absent("kv_cache_scheme", "the cache keeps the model's dtype")
    for extra in ("sparsity_config", "transform_config"):  # the writer leaves them empty where unused
        if scheme.get(extra, default={}) != {}:
            scheme.complain(extra, raw[extra], "empty: codes and scales are all that is read")
    groups = scheme.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        scheme.complain("config_groups", groups, "an object with one group")
        return True
    scheme.refuse_unknown(("global_compression_ratio", "ignore", "version"))
    name, group = next(iter(groups.items()))
    group = Fields(group, f"{where}config_groups.{name}.", text.problems)
    for activations in ("input_activations", "output_activations"):
        group.absent(activations, "only weights are quantised")
    group.only("format", "mxfp4-pack-quantized", default=None)
    weights = Fields(group.get("weights"), f"{group.where}weights.", text.problems)
    if isinstance(group.values.get("weights"), Mapping):
        check_weight_scheme(weights)
    group.refuse_unknown(("targets",))
    return True


def check_weight_scheme(weights: Fields) -> None:
    """MXFP4: 4-bit floats, one power-of-two scale for 32 of them."""
    weights.only("num_bits", 4)
    weights.only("type", "float")
    weights.only("strategy", "group", default="group")
    weights.only("group_size", 32)
    weights.only("symmetric", True, default=True)
    weights.only("dynamic", False, default=False)
    weights.only("scale_dtype", "torch.uint8", default="torch.uint8")
    weights.absent("actorder", "columns stand in their own order")
    weights.absent("block_structure", "scales are by group")
    weights.absent("zp_dtype", "there is no zero point")
    weights.refuse_unknown(("observer", "observer_kwargs"))
