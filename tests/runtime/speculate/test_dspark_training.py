"""Dense attention of many blocks equals the paged op, block by block."""

import torch
from k3compile.kernels.samples import row_bounds
from k3compile.runtime.speculate.dspark_training import dense_attention, keys_and_values

HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 3, 8, 4, 6, 16, 4


def test_each_block_sees_what_the_paged_op_sees():
    batch, length, block = 2, 24, 5
    anchors = torch.tensor([[0, 7, 20], [3, 3, 23]])
    rows = anchors.numel() * block
    q = torch.randn(rows, HEADS, NOPE + ROPE, dtype=torch.float64)
    own = torch.randn(rows, LATENT + ROPE, dtype=torch.float64)
    kv_b = torch.randn(HEADS * (NOPE + VALUE), LATENT, dtype=torch.float64) / 4
    context = torch.randn(batch, length, LATENT + ROPE, dtype=torch.float64)
    got = dense_attention(q, kv_b, context, own, anchors, block, 0.3)
    pages = context.view(-1, PAGE, LATENT + ROPE)
    table = torch.arange(len(pages)).view(batch, -1).repeat_interleave(3, 0)
    cu = row_bounds([block] * anchors.numel())
    want = torch.ops.k3.mla_attend_block(q, kv_b, pages, table, anchors.flatten(), cu, own, 0.3)
    assert got.shape == (rows, HEADS, VALUE)
    assert (got - want).abs().max() < 1e-13


def test_the_rotated_part_of_a_key_is_shared_by_the_heads():
    rows, kv_b = torch.randn(5, LATENT + ROPE), torch.randn(HEADS * (NOPE + VALUE), LATENT)
    keys, values = keys_and_values(rows, kv_b, HEADS, NOPE)
    assert keys.shape == (5, HEADS, NOPE + ROPE)
    assert values.shape == (5, HEADS, VALUE)
    assert torch.equal(keys[:, 1, NOPE:], rows[:, LATENT:])
    assert torch.allclose(values[2, 1], kv_b.view(HEADS, -1, LATENT)[1, NOPE:] @ rows[2, :LATENT], atol=1e-5)
