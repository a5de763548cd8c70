"""One bit of a weight, one setting or another layout of pools makes another fingerprint."""

import dataclasses
from types import SimpleNamespace

import torch
from k3compile.runtime.cache.tiers.fingerprint import fingerprint
from small_models import SMALL


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [
        ("a", torch.randn(300, 700, generator=made)),
        ("b", torch.randn(64, generator=made, dtype=torch.float64).to(torch.bfloat16)),
        ("c", torch.randint(0, 256, (9, 11), generator=made, dtype=torch.uint8)),
        ("d", torch.randn(5, 6, generator=made, dtype=torch.float64).t()),
        ("e", torch.tensor(1.5)),
        ("f", torch.empty(0, 3)),
    ]


def test_the_same_again_is_the_same():
    made = {fingerprint(weights(), SMALL, "g") for _ in range(2)}
    assert len(made) == 1
    assert len(made.pop()) == 64


def test_any_single_bit_of_any_weight_counts():
    made = {fingerprint(weights(), SMALL, "g")}
    changes = [(0, 0), (0, 123_457), (0, 209_999), (1, 63), (2, 50), (3, 29), (4, 0)]
    for which, at in changes:
        changed = weights()
        flat = changed[which][1].reshape(-1).clone()
        raw = flat.view(torch.uint8)
        raw[at * flat.element_size()] ^= 1
        changed[which] = (changed[which][0], flat.view(changed[which][1].shape))
        made.add(fingerprint(changed, SMALL, "g"))
    assert len(made) == 1 + len(changes)


def test_names_shapes_settings_geometry_and_rank_count():
    a = fingerprint(weights(), SMALL, "g")
    renamed = [("z", weights()[0][1]), *weights()[1:]]
    reshaped = [("a", weights()[0][1].view(700, 300)), *weights()[1:]]
    made = {
        a,
        fingerprint(renamed, SMALL, "g"),
        fingerprint(reshaped, SMALL, "g"),
        fingerprint(weights(1), SMALL, "g"),
        fingerprint(weights(), dataclasses.replace(SMALL, gate_lower_bound=-4.0), "g"),
        fingerprint(weights(), SMALL, "h"),
        fingerprint(weights(), SMALL, "g", "rank 1 of 8"),
    }
    assert len(made) == 7


def test_a_namespace_serves_as_configuration():
    one = SimpleNamespace(vocab_size=3, eos=(1, 2))
    two = SimpleNamespace(eos=(1, 2), vocab_size=3)
    assert fingerprint([], one, "g") == fingerprint([], two, "g")
    assert fingerprint([], one, "g") != fingerprint([], SimpleNamespace(vocab_size=4, eos=(1, 2)), "g")
