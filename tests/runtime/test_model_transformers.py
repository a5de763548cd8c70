"""transformers' Kimi-Linear, which we did not write, agrees on our checkpoint and on weights of its own.

It takes 1e-6 for the MLA latent norm, so our parameter is set to that here.
"""

import json

import numpy as np
import pytest
import torch
from broken_checkpoints import edit_index
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.weights import load_model
from safetensors.torch import load_file, save_file
from small_models import Row, make_step

transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]

BOUND = 1e-4
DENSE = ("layers.0.block_sparse_moe.", "layers.0.mlp.")
TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 768, 130)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("oracle") / "tiny-linear", "tiny-linear")


@pytest.fixture(scope="module")
def theirs(checkpoint):
    model, info = transformers.KimiLinearForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


def logits(model, sizes: list[int]) -> torch.Tensor:
    pools, seen, out = model.make_pools(2, 4, 64), 0, []
    with torch.no_grad():
        for size in sizes:
            hidden, _ = model(make_step([Row(TOKENS[seen : seen + size], 1, seen, [1, 2, 3])]), pools)
            out.append(model.logits(hidden))
            seen += size
    return torch.cat(out)


def compare(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() < BOUND
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def test_it_reads_our_checkpoint_and_gives_the_same_logits(checkpoint, theirs):
    ours = load_model(checkpoint, latent_norm_eps=1e-6)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.5
    for sizes in ([130], [64, 1, 65]):
        compare(logits(ours, sizes), expected)


def test_step_by_step_with_caches_on_both_sides(checkpoint, theirs):
    ours = load_model(checkpoint, latent_norm_eps=1e-6)
    sizes, cache, expected, seen = [70, *[1] * 20], None, [], 0
    with torch.no_grad():
        for size in sizes:
            step = torch.tensor([TOKENS[seen : seen + size]])
            out = theirs(step, cache=cache, use_cache=True)
            cache, seen = out.past_key_values, seen + size
            expected.append(out.logits[0])
    compare(logits(ours, sizes), torch.cat(expected))


def test_we_read_the_weights_it_draws_and_saves(checkpoint, theirs, tmp_path):
    torch.manual_seed(0)
    drawn = transformers.KimiLinearForCausalLM(theirs.config).float().eval()
    with torch.no_grad():  # its own start leaves logits near zero: spread them
        for name, parameter in drawn.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.mul_(5)
            elif "A_log" in name:
                parameter.normal_()
            elif "dt_bias" in name:
                parameter.normal_(-2)
    drawn.save_pretrained(tmp_path / "saved", max_shard_size="1MB")
    rename_dense_layer(tmp_path / "saved")
    raw = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
    ours = load_model(tmp_path / "saved", latent_norm_eps=1e-6)
    with torch.no_grad():
        expected = drawn(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.1
    compare(logits(ours, [130]), expected)


def rename_dense_layer(path) -> None:
    """transformers saves the dense layer under the name of the experts; the release does not."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name.replace(*DENSE): tensor for name, tensor in tensors.items()}, file)

    def rename(names: dict) -> None:
        for name in list(names):
            names[name.replace(*DENSE)] = names.pop(name)

    edit_index(path, rename)
