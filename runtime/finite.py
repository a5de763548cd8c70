"""Every number of a model is finite before it is served: the loader's rule, whoever filled or changed it.

NaN or infinity need not reach an answer's logits, where it would be seen: a router's bias only says who is
chosen, and gates, scores and decays lie between bounds whatever goes in. The answers are then nonsense that
nothing complains of. Looking costs one reading of the weights; packed experts are bytes and are left out.
"""

from __future__ import annotations

from typing import Any

import torch

SHOWN = 10  # names in the text of an error


def check_finite(*models: Any) -> None:
    """Raise ValueError naming the parameters that hold NaN or infinity; of models that have parameters."""
    every = (p for model in models for p in getattr(model, "named_parameters", list)())
    named = [(n, p) for n, p in every if p.is_floating_point() and p.numel()]
    if not named:
        return
    bounds = torch.stack([bound.double() for _, p in named for bound in p.detach().aminmax()])
    finite = bounds.isfinite().view(-1, 2).all(1).tolist()  # the device is waited for once
    wrong = [name for (name, _), fine in zip(named, finite) if not fine]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(
            f"{', '.join(wrong[:SHOWN])}{more} of the model hold NaN or infinity, as no trained model does; "
            "fill or repair them before an engine is made"
        )
