"""What ordinary models write in place: caches of decoding, running statistics, optimizers, windows.

None of it is what Inductor gets wrong, so none of it may be kept from Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend


def static_cache(k, v, q, new_k, new_v, at):
    k.index_copy_(2, at, new_k)
    v.index_copy_(2, at, new_v)
    return attend(q, k, v)


def two_layers(k, v, q, new_k, new_v, at, k2, v2):
    o = static_cache(k, v, q, new_k, new_v, at)
    return static_cache(k2, v2, o, new_k + o, new_v * o, at)


def cache_that_counts(k, v, q, new_k, new_v, at):
    k.index_copy_(2, at, new_k)
    at.add_(1)
    v.index_copy_(2, at - 1, new_v)
    return attend(q, k, v)


def cache_by_slices(k, v, q, new_k, new_v, at):
    k[:, :, 2:4] = new_k
    v[:, :, 2:4] = new_v
    return attend(q, k[:, :, :4], v[:, :, :4])


def sliding_cache(k, q, new_k):
    k.copy_(torch.cat([k[:, :, 2:], new_k], 2))
    return q @ k.mT


def rolled_cache(k, q, new_k):
    rolled = k.roll(-2, 2)
    rolled[:, :, -2:] = new_k
    k.copy_(rolled)
    return q @ k.mT


def cleared_and_added_cache(k, q, new_k):
    rolled = k.roll(-2, 2).index_copy(2, torch.arange(4, 6), new_k)
    k.zero_()
    k.add_(rolled)
    return q @ k.mT


def cache_by_index(k, q, new_k, at):
    k[:, :, at] = new_k
    return q @ k.mT


def paged_cache(k, q, new_k, at):
    k.view(-1, 4).index_copy_(0, at, new_k.reshape(-1, 4)[:2])
    return q @ k.mT


def moving_average(w, average):
    average.mul_(0.9).add_(w, alpha=0.1)
    return average.sum()


def adam(w, gradient, m, v, steps):
    steps.add_(1)
    m.mul_(0.9).add_(gradient, alpha=0.1)
    v.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    w.addcdiv_(m / (1 - 0.9**steps), (v / (1 - 0.99**steps)).sqrt() + 1e-8, value=-1e-3)
    return w.sum()


def kept_before_a_step(w, old, gradient):
    old.copy_(w)
    w.add_(gradient)
    return (w - old).sum()


def convolution_window(window, x, taps):
    full = torch.cat([window, x], 1)
    window.copy_(full[:, -3:])
    return (full * taps).sum(1)


def recurrent_state(state, x):
    new = torch.tanh(state + x)
    state.copy_(new)
    return new


class Ordinary(NamedTuple):
    """A program and its arguments."""

    fn: Callable[..., Tensor]
    args: list[Tensor]


def ordinary() -> dict[str, Ordinary]:
    """Name -> program, with new arguments; train-mode BatchNorm is one."""
    made = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=made)

    def cache() -> Tensor:
        return some(1, 2, 6, 4)

    def new() -> Tensor:
        return some(1, 2, 2, 4)

    at = torch.tensor([1, 2])
    decode = [cache(), cache(), new(), new(), new(), at]
    found = {
        fn.__name__: Ordinary(fn, [t.clone() for t in decode])
        for fn in (static_cache, cache_that_counts, cache_by_slices)
    }
    found["two_layers"] = Ordinary(two_layers, [*(t.clone() for t in decode), cache(), cache()])
    for fn in (sliding_cache, rolled_cache, cleared_and_added_cache, cache_by_index, paged_cache):
        extra = [at.clone()] if fn in (cache_by_index, paged_cache) else []
        found[fn.__name__] = Ordinary(fn, [cache(), new(), new(), *extra])
    found["moving_average"] = Ordinary(moving_average, [some(4), some(4)])
    found["adam"] = Ordinary(adam, [*(some(4) for _ in range(4)), torch.zeros(())])
    found["kept_before_a_step"] = Ordinary(kept_before_a_step, [some(4) for _ in range(3)])
    found["convolution_window"] = Ordinary(convolution_window, [some(2, 3, 4), some(2, 1, 4), some(4, 4)])
    found["recurrent_state"] = Ordinary(recurrent_state, [some(4), some(4)])
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    found["batch_norm"] = Ordinary(layers, [some(1, 2, 5, 5)])
    return found
