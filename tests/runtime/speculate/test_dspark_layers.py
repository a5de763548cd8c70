"""A layer's parts against their formulas."""

import torch
from draft_reference import small_draft
from k3compile.kernels.norm import rms_norm
from small_models import SMALL


def test_only_the_tail_of_a_query_turns_with_its_position():
    model = small_draft(SMALL)
    attention = model.layers[1].self_attn
    x = torch.randn(1, SMALL.hidden_size, dtype=torch.float64).expand(2, -1)
    q = attention.queries(x, model.turn(torch.tensor([0, 11])))
    assert q.shape == (2, 3, 22)
    assert torch.equal(q[0, :, :10], q[1, :, :10])
    assert not torch.allclose(q[0, :, 10:], q[1, :, 10:])
    down = rms_norm(x @ attention.q_a_proj.weight.T, attention.q_a_layernorm.weight, 1e-5)
    assert torch.allclose(q[0], (down @ attention.q_b_proj.weight.T)[0].view(3, 22), rtol=0, atol=1e-12)


def test_the_feed_forward_is_swiglu():
    mlp, x = small_draft(SMALL).layers[0].mlp, torch.randn(3, SMALL.hidden_size, dtype=torch.float64)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    want = (gate * torch.sigmoid(gate) * up) @ mlp.down_proj.weight.T
    assert torch.allclose(mlp(x), want, rtol=0, atol=1e-12)


def test_the_norm_is_the_ops_meaning_and_has_a_gradient():
    norm = small_draft(SMALL).final_norm
    x = torch.randn(3, SMALL.hidden_size, dtype=torch.float64, requires_grad=True)
    assert torch.equal(norm(x), rms_norm(x.detach(), norm.weight, norm.eps))
    norm(x).sum().backward()
    assert x.grad.abs().sum() > 0
