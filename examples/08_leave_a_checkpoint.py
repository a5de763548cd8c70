"""Lesson 8: one prefill pass leaves the KDA state at a point inside it, and the model does not know."""

import k3compile.kernels
import torch

import k3compile

HEADS, WIDTH = 2, 16


def layer(q, k, v, g, beta, state):
    return torch.ops.k3.kda_scan(q, k, v, g, beta, state)


def inputs(tokens):
    q, k, v = (torch.nn.functional.normalize(torch.randn(1, tokens, HEADS, WIDTH), dim=-1) for _ in range(3))
    g, beta = -torch.rand(1, tokens, HEADS, WIDTH), torch.rand(1, tokens, HEADS)
    return [q, k, v, g, beta]


compiled = torch.compile(layer, backend="k3", fullgraph=True, options={"inner": "aot_eager"})
start, prompt = torch.zeros(1, HEADS, WIDTH, WIDTH), inputs(200)
with torch.no_grad():
    with k3compile.export_at([128]):
        compiled(*prompt, start)
    (state,) = k3compile.checkpoints(compiled).states
    _, stopped = layer(*[t[:, :128] for t in prompt], start)

print(f"state after 128 of 200 tokens: {tuple(state.shape)}")
print("same bits as a run that stops there:", torch.equal(state, stopped))
