"""Kimi-Linear of transformers, adopted and compiled, exports at each of its KDA layers by default."""

import pytest
import torch
from k3compile.runtime.checkpoint import make_checkpoint
from kda_oracle import worst

import k3compile
from k3compile import report

transformers = pytest.importorskip("transformers", reason="the model is theirs")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_reports"),
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]


@torch.no_grad()
def test_every_kda_layer_leaves_the_states_of_a_run_over_the_first_tokens(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny-linear", "tiny-linear")
    model = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 700, (2, 100), generator=torch.Generator().manual_seed(0))
    want = model(ids).logits
    layers = sum(kind == "linear_attention" for kind in model.config.layer_types)
    k3compile.adopt(model)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="k3", fullgraph=True, options={"inner": "aot_eager"})
    with k3compile.export_at([64, 33]):
        assert (fast(ids, use_cache=True).logits - want).abs().max() < 1e-4
    made, found = report.latest(), k3compile.checkpoints(fast)
    assert (made.applied("state_export"), made.missed("state_export")) == (2 * layers, [])
    assert len(found.states) == len(found.windows) == layers == 3
    for row, offset in enumerate(found.offsets):
        with k3compile.export_at([offset]):
            fast(ids[row : row + 1, :offset], use_cache=True)
        cut = k3compile.checkpoints(fast)
        for got, end in zip((*found.states, *found.windows), (*cut.states, *cut.windows), strict=True):
            assert worst(got[row], end[0]) < 1e-5
