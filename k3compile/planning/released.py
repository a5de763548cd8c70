"""The released models by name, so that a plan needs no file: `kimi-k3` with its draft, and `kimi-linear`.

Their numbers in the words of our presets, which `config_json` turns into the released `config.json`. They are
no presets: nobody makes a checkpoint of random weights of that size.
"""

from __future__ import annotations

from pathlib import Path

from ..features import nearest
from ..runtime.config import K3Config
from ..runtime.presets import DraftPreset, Preset, config_json, draft_config_json
from ..runtime.speculate.dspark_config import DSparkConfig

MODELS = {
    "kimi-k3": Preset(
        family="kimi_k3",
        layers=93,
        mla_layers=(*range(4, 93, 4), 93),
        block=12,
        hidden=7168,
        heads=96,
        kda_width=128,
        q_lora=1536,
        kv_lora=512,
        nope=128,
        rope=64,
        value=128,
        experts=896,
        top_k=16,
        latent=3584,
        expert_width=3072,
        dense_width=33792,
        vocab=163840,
        shard_bytes=0,
    ),
    "kimi-linear": Preset(
        family="kimi_linear",
        layers=27,
        mla_layers=(4, 8, 12, 16, 20, 24, 27),
        hidden=2304,
        heads=32,
        kda_width=128,
        kv_lora=512,
        nope=128,
        rope=64,
        value=128,
        experts=256,
        top_k=8,
        shared=1,
        expert_width=1024,
        dense_width=9216,
        vocab=163840,
        shard_bytes=0,
    ),
}
DRAFT = "released"  # the DSpark draft that goes with kimi-k3
DRAFT_OF = "kimi-k3"
DRAFT_PRESET = DraftPreset(layers=5, heads=64, inner=14336, markov=256, block=7, taps=(2, 23, 47, 71, 89))


def read_model(name: str) -> K3Config:
    """A released model's configuration, or that of a config.json or checkpoint folder of this path.

    Raises ValueError for neither, and ConfigError (a ValueError) for a configuration we do not run.
    """
    if name in MODELS:
        return K3Config.from_dict(config_json(MODELS[name]))
    if not Path(name).exists():
        known = ", ".join(MODELS)
        raise ValueError(
            f"no model {name!r}{nearest(name, MODELS)}: give a config.json, a folder, or {known}"
        )
    return K3Config.from_file(name)


def read_draft(name: str, target: K3Config) -> DSparkConfig:
    """The released draft's configuration, or that of the draft in this path; both held against the target.

    Raises ValueError for a path that is not there, and ConfigError for a draft of another model.
    """
    if name == DRAFT:
        return DSparkConfig.from_dict(draft_config_json(MODELS[DRAFT_OF], DRAFT_PRESET), target)
    if not Path(name).exists():
        raise ValueError(f"no draft {name!r}{nearest(name, [DRAFT])}: give its folder, or {DRAFT}")
    return DSparkConfig.from_file(name, target)
