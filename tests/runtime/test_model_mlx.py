"""mlx-lm, which we did not write, loads our checkpoints and computes the same.

Layer by layer on the same inputs (1e-5 of the layer's largest value), and logits of the whole (1e-4), in
float32. mlx-lm takes 1e-6 for the two MLA latent norms, so our parameter is set to that here. A token whose
choice of experts hangs on less than 1e-5 of score may rightly be computed by other experts: it is left out
and counted.
"""

import numpy as np
import pytest
import torch
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.model import DecoderLayer
from k3compile.runtime.moe import Moe
from k3compile.runtime.weights import load_model
from lanes import thinned
from small_models import Row, make_step

mx = pytest.importorskip("mlx.core", reason="mlx is the oracle")
mlx_lm = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is the oracle")
pytestmark = pytest.mark.oracle

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 768, 80)]
LAYER_BOUND, LOGIT_BOUND, GAP = 1e-5, 1e-4, 1e-5
MLX_LATENT_EPS = 1e-6
PAGES = [1, 2]


@pytest.fixture(scope="module", params=["tiny", "tiny-linear"])
def pair(request, tmp_path_factory):
    """(our float32 model, our float64 model, theirs in float32) of one checkpoint."""
    path = make_checkpoint(tmp_path_factory.mktemp("oracle") / request.param, request.param)
    theirs, _ = mlx_lm.load_model(path)
    theirs.apply(lambda array: array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
    # Kimi-Linear's port there reads the eps from the configuration
    eps = MLX_LATENT_EPS if request.param == "tiny" else 1e-5
    ours = load_model(path, torch.float32, latent_norm_eps=eps)
    return ours, load_model(path, torch.float64, latent_norm_eps=eps), theirs


def run_ours(model, sizes: list[int]) -> np.ndarray:
    """Logits [T, V] with the tokens fed in pieces of ``sizes``."""
    pools, seen, out = model.make_pools(2, 3, 64), 0, []
    with torch.no_grad():
        for size in sizes:
            hidden, _ = model(make_step([Row(TOKENS[seen : seen + size], 1, seen, PAGES)]), pools)
            out.append(model.logits(hidden))
            seen += size
    return torch.cat(out).numpy()


def run_theirs(model, sizes: list[int]) -> np.ndarray:
    """The same of mlx-lm, through its cache."""
    from mlx_lm.models.cache import make_prompt_cache

    cache, seen, out = make_prompt_cache(model), 0, []
    for size in sizes:
        logits = model(mx.array([TOKENS[seen : seen + size]]), cache=cache)
        out.append(np.array(logits[0]))
        seen += size
    return np.concatenate(out)


def close_calls(model) -> dict[int, np.ndarray]:
    """Layer -> mask [T] of tokens whose last chosen and first unchosen expert are within GAP, in float64."""
    found, hooks = {}, []

    def look(index: int, layer: Moe):
        def hook(module, args):
            scores = torch.sigmoid(args[0] @ layer.gate.T) + layer.e_score_correction_bias
            best = scores.sort(-1, descending=True).values
            found[index] = (best[:, layer.top_k - 1] - best[:, layer.top_k] < GAP).numpy()

        return hook

    for index, layer in enumerate(model.layers):
        if isinstance(layer.ffn, Moe):
            hooks.append(layer.ffn.register_forward_pre_hook(look(index, layer.ffn)))
    run_ours(model, [len(TOKENS)])
    for hook in hooks:
        hook.remove()
    return found


def their_layers(model, monkeypatch) -> list[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
    """(input, snapshots before the layer, output) of each of mlx-lm's layers."""
    layers = (model.language_model if "language_model" in model else model).model.layers
    call, found = type(layers[0]).__call__, []

    def recording(layer, x, mask=None, cache=None, blocks=None):
        before = None if blocks is None or blocks.raw is None else np.array(blocks.raw[:, 0])
        extra = {} if blocks is None else {"blocks": blocks}
        out = call(layer, x, mask=mask, cache=cache, **extra)
        found.append((np.array(x[0]), before, np.array((out[0] if isinstance(out, tuple) else out)[0])))
        return out

    monkeypatch.setattr(type(layers[0]), "__call__", recording)
    mx.eval(model(mx.array([TOKENS])))
    return found


def test_every_layer_agrees_on_the_same_inputs(pair, monkeypatch):
    ours, exact, theirs = pair
    excluded = close_calls(exact)
    step = make_step([Row(TOKENS, 1, 0, PAGES)])
    pools = ours.make_pools(2, 3, 64)
    layers = their_layers(theirs, monkeypatch)
    assert len(layers) == len(ours.layers)
    for index, (p, bank, expected) in enumerate(layers):
        block = ours.layers[index]
        blocks = np.zeros((0, *p.shape), p.dtype) if bank is None else bank
        blocks = np.concatenate([blocks, p[None]]) if block.snapshot else blocks
        with torch.no_grad():
            out = DecoderLayer.forward(block, torch.tensor(p), torch.tensor(blocks), pools[index], step)
        out = out.numpy()
        keep = ~excluded.get(index, np.zeros(len(TOKENS), bool))
        assert keep.mean() > 0.9, "too many close calls to say anything"
        error = np.abs(out - expected)[keep].max() / np.abs(expected).max()
        assert error < LAYER_BOUND, f"layer {index}: {error:.1e}"


SIZES = {"whole": [80], "step by step": [1] * 24, "mixed": [40, *[1] * 8, 32]}


@pytest.mark.parametrize("sizes", thinned(SIZES.values(), 1), ids=SIZES)
def test_logits_agree_whole_and_step_by_step(pair, sizes):
    ours, exact, theirs = pair
    excluded = np.any([*close_calls(exact).values()], axis=0)[: sum(sizes)]
    assert excluded.mean() < 0.1
    a, b = run_ours(ours, sizes), run_theirs(theirs, sizes)
    error = np.abs(a - b)[~excluded].max()
    assert error < LOGIT_BOUND, f"{error:.1e}, {excluded.sum()} tokens left out"
    assert (a.argmax(-1) == b.argmax(-1))[~excluded].all()
