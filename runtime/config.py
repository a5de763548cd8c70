"""What a model is: every number of a Kimi K3 or Kimi-Linear ``config.json`` that changes the result.

    kimi_k3      { text_config: {...}, vision_config: {...} }     -> K3Config, family "kimi_k3"
    kimi_linear  { ... }                                          -> K3Config, family "kimi_linear"

Names are those of ``config.json``. Where the file says null, or leaves a field out because the model lacks
the part, the value here is 0, 0.0 or False. Layers count from 0 here and from 1 in the file's two lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .config_reader import read

GROUP = 32  # input columns that share one MXFP4 scale


class ConfigError(ValueError):
    """A configuration we do not run; the message lists every reason."""

    def __init__(self, what: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n  ".join([f"cannot run {what}:", *problems]))


T = TypeVar("T")


def read_config(path: str | Path, parse: Callable[[Any], T]) -> T:
    """What ``parse`` makes of the JSON in ``path``, or of config.json in that directory.

    Raises ConfigError naming the file, for a file that cannot be read and for what ``parse`` objects to.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), ["there is no such file"]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"it cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError(str(path), [f"it is not JSON: {error}"]) from None
    try:
        return parse(raw)
    except ConfigError as error:
        raise ConfigError(str(path), error.problems) from None


MAX_EXPERTS = 1 << 14  # of a layer: a mistyped number would list tensors until memory is gone


@dataclass(frozen=True)
class K3Config:
    """Kimi K3's text model, or Kimi-Linear: the parts are switched by zeros (see the fields).

    Raises ConfigError (a ValueError) listing every contradiction between the fields.
    """

    family: str  # "kimi_k3" or "kimi_linear": decides names and quirks on disk, never the arithmetic
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int  # of the dense layers
    rms_norm_eps: float
    latent_norm_eps: float  # of the two MLA latent norms: 1e-5 in vLLM, 1e-6 in the released Python
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"

    attn_res_block_size: int  # 0: an ordinary residual stream
    situ_beta: float  # 0.0: plain SiLU
    situ_linear_beta: float

    num_attention_heads: int  # MLA
    q_lora_rank: int  # 0: a full-rank query
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool

    kda_layers: tuple[int, ...]  # from 0; the other layers are MLA
    kda_num_heads: int
    kda_head_dim: int
    gate_lower_bound: float  # 0.0: the softplus decay of Kimi-Linear
    use_full_rank_gate: bool

    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int  # 0: experts work at full width
    moe_renormalize: bool
    routed_scaling_factor: float
    experts_packed: bool  # MXFP4 experts; False: experts in `dtype`

    def __post_init__(self) -> None:
        problems = list(contradictions(asdict(self)))
        if problems:
            raise ConfigError("this model", problems)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], latent_norm_eps: float = 1e-5) -> K3Config:
        """Read a parsed ``config.json``. Raises ConfigError listing every field we do not run."""
        values, problems = read(raw)
        values["latent_norm_eps"] = latent_norm_eps
        problems += contradictions(values)
        if problems:
            raise ConfigError("this configuration", problems)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path, latent_norm_eps: float = 1e-5) -> K3Config:
        """Read ``config.json``, or the one in a directory. Raises ConfigError, also when it is not JSON."""
        return read_config(path, lambda raw: cls.from_dict(raw, latent_norm_eps))

    @property
    def eos_token_id(self) -> int:
        """The first token that ends an answer."""
        return self.eos_token_ids[0]

    @property
    def latent_size(self) -> int:
        """Width the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the one MLP that holds all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def num_snapshots(self) -> int:
        """Layer inputs that AttnRes keeps in one pass."""
        block = self.attn_res_block_size
        return -(-self.num_hidden_layers // block) if block else 0

    def is_kda(self, layer: int) -> bool:
        """KDA, or else MLA."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Routed experts, or else one dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def is_snapshot(self, layer: int) -> bool:
        """The layer banks its input and restarts the running sum."""
        return bool(self.attn_res_block_size) and layer % self.attn_res_block_size == 0

    def kind(self, layer: int) -> tuple[str, str, bool]:
        """Layers of one kind share a graph: ("kda" or "mla", "moe" or "dense", snapshot)."""
        attention = "kda" if self.is_kda(layer) else "mla"
        return attention, "moe" if self.is_moe(layer) else "dense", self.is_snapshot(layer)


def contradictions(c: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be true of one model. A value of None was complained about before and is left out."""

    def known(*names: str) -> bool:
        return all(c.get(name) is not None for name in names)

    if known("num_experts", "num_experts_per_token") and c["num_experts_per_token"] > c["num_experts"]:
        top, experts = c["num_experts_per_token"], c["num_experts"]
        yield f"num_experts_per_token {top} is more than num_experts {experts}"
    if known("vocab_size"):
        for name in ("bos_token_id", "eos_token_ids", "pad_token_id"):
            ids = c.get(name) if name == "eos_token_ids" else [c.get(name)]
            bad = [one for one in ids or [] if one is not None and not 0 <= one < c["vocab_size"]]
            if bad:
                yield f"{name} holds {bad}, outside the vocabulary of {c['vocab_size']}"
    for name in ("rms_norm_eps", "latent_norm_eps"):
        if known(name) and not 0.0 < c[name] < float("inf"):
            yield f"{name} is {c[name]}, and must be a positive number"
    if known("gate_lower_bound") and not -5.0 <= c["gate_lower_bound"] <= 0.0:
        bound = c["gate_lower_bound"]
        yield f"gate_lower_bound is {bound}, and must lie in [-5, 0): kernels bound exponents by it"
    if c.get("family") == "kimi_k3" and c.get("gate_lower_bound") == 0.0:
        yield "gate_lower_bound is missing, and a kimi_k3 has one: without it the decay is Kimi-Linear's"
    if known("num_experts") and c["num_experts"] > MAX_EXPERTS:
        yield f"num_experts is {c['num_experts']}, and at most {MAX_EXPERTS} are loaded"
    if known("situ_beta", "situ_linear_beta") and bool(c["situ_beta"]) != bool(c["situ_linear_beta"]):
        yield "SiTU needs both activation_situ_beta and activation_situ_linear_beta, SiLU neither"
    if known("kda_layers", "num_hidden_layers"):
        outside = [i for i in c["kda_layers"] if not 0 <= i < c["num_hidden_layers"]]
        if outside:
            yield f"KDA layers {outside} (from 0) do not exist in {c['num_hidden_layers']} layers"
    if c.get("experts_packed"):
        for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if known(name) and c[name] % GROUP:
                yield f"{name} is {c[name]}, and MXFP4 experts need a multiple of {GROUP}"
        if c.get("routed_expert_hidden_size") == 0 and known("hidden_size") and c["hidden_size"] % GROUP:
            yield f"hidden_size is {c['hidden_size']}, and MXFP4 experts need a multiple of {GROUP}"
