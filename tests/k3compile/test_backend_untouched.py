"""A model with nothing for k3 becomes the code that plain Inductor makes of it, and the report says so."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from k3compile import report

pytestmark = [pytest.mark.inductor, pytest.mark.slow]


def codes(model, *args):
    """What Inductor generates under each backend, without the number it gives a graph."""
    found = []
    for backend in ("inductor", "k3"):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            _, made = run_and_get_code(compiled, *args)
        found.append(["\n".join(x for x in code.splitlines() if "# AOT ID" not in x) for code in made])
    return found


def check(model, *args):
    plain, ours = codes(model, *args)
    assert plain == ours
    assert len(plain) == 1
    made = report.latest()
    assert made.reason == "nothing here for k3, so it is what inductor alone makes of it"
    said = {r.pass_name: r.reason for r in made.remarks}
    assert said["state_export"] == "no KDA prefill or convolution that can leave a checkpoint in this graph"
    assert "no read or write through an index tensor" in said["contiguous_views"]


def test_an_mlp():
    check(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.ones(3, 8))


@pytest.mark.oracle
def test_a_llama():
    transformers = pytest.importorskip("transformers", reason="a model we did not write")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    check(transformers.LlamaForCausalLM(config).eval(), torch.arange(7).view(1, 7))


def test_a_graph_with_a_k3_op_is_not_called_untouched():
    with torch.no_grad():
        compiled = torch.compile(lambda x: torch.ops.k3.rms_norm(x, x[0], 1e-5), backend="k3")
        compiled(torch.ones(3, 8))
    assert report.latest().reason == ""
