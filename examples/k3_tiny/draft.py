"""The DSpark draft of the trained model: it learns to say what the model says, a block of eight at a time.

    rows of problems --target, no gradient--> running sums after three layers --+
    an answer's token (the anchor) + 7 masks ---------------------------------- draft --> the next 8 tokens

The answers of the rows are what the target says, since it is right. The confidence head learns whether each
token would be accepted, given that those before it were.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.model import Model
from k3compile.runtime.presets import DRAFTS, PRESETS, draft_config_json
from k3compile.runtime.speculate.dspark_checkpoint import write_draft
from k3compile.runtime.speculate.dspark_config import DSparkConfig
from k3compile.runtime.speculate.dspark_model import DSparkModel
from k3compile.runtime.speculate.dspark_weights import FOLDER, tensors_of
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.weights import load_model
from torch import Tensor
from torch.nn import functional as F

from .forward import forward
from .optimiser import Optimiser
from .rows import Rows, batch
from .weights import unpacked

RAW = draft_config_json(PRESETS["tiny"], DRAFTS["tiny"])
RATE, ADAM_RATE = 0.006, 0.003
ANCHORS = 24  # blocks of a row
CONFIDENCE = 0.1  # of the loss


def train_draft(out: Path, steps: int, minutes: float, seed: int, say: Callable[[str], None]) -> None:
    """Train a draft for the checkpoint in ``out`` and write it beside, into ``out/draft``."""
    target, tokenizer = load_model(out), Tokenizer(out)
    weights = {name: value.to(torch.bfloat16) for name, value in unpacked(target).items()}
    config = DSparkConfig.from_dict(RAW, target.config)
    draft = DSparkModel(config, dtype=torch.float32)
    fill(draft, seed)
    parameters = {name: value.requires_grad_() for name, value in draft.named_parameters()}
    optimiser = Optimiser({name: value.detach() for name, value in parameters.items()})
    begin, done = time.monotonic(), 0
    while (progress := max(done / steps, (time.monotonic() - begin) / (60 * minutes))) < 1:
        rng = random.Random(f"draft {seed} {done}")
        rows, taps = lesson(target.config, weights, config.target_layer_ids, tokenizer, rng)
        speed = min(1.0, progress / 0.03 + 0.05, (1 - progress) / 0.5)
        for _ in range(2):  # what the target does costs most, and there are many blocks in a row
            loss, length = loss_of(draft, target, rows, taps, rng)
            gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))
            with torch.no_grad():
                optimiser.step(gradients, RATE * speed, ADAM_RATE * speed)
            done += 1
        if done % 20 == 0:
            say(f"draft step {done}: loss {loss.item():.4f}, {length:.2f} drafts right in a row")
    assert all(value.isfinite().all() for value in parameters.values())
    write_draft(out / FOLDER, RAW, tensors_of(draft, target.embed_tokens))


def fill(draft: DSparkModel, seed: int) -> None:
    """Random weights; gains 1."""
    random_ = torch.Generator().manual_seed(seed)
    for name, value in draft.named_parameters():
        if "norm" in name:
            value.fill_(1.0)
        elif name.startswith(("markov_w2", "confidence")):
            value.zero_()
        else:
            value.copy_(torch.randn(value.shape, generator=random_) * value.shape[-1] ** -0.5)


def lesson(
    config: K3Config,
    weights: dict[str, Tensor],
    layers: Sequence[int],
    tokenizer: Tokenizer,
    rng: random.Random,
) -> tuple[Rows, Tensor]:
    """Rows, and the target's running sums after ``layers``, [B, T, taps, D]."""
    kind = rng.choices(("short", "thinking", "tool", "long"), (12, 3, 3, 1))[0]
    length = {"short": 128, "long": 512}.get(kind, 256)
    rows = batch(tokenizer, kind, 2048 // length, length, rng)
    with torch.no_grad():
        taps = forward(config, weights, rows.tokens, layers).taps
    return rows, torch.stack(taps, 2).float()


def loss_of(
    draft: DSparkModel, target: Model, rows: Rows, taps: Tensor, rng: random.Random
) -> tuple[Tensor, float]:
    """The loss of some blocks of each row, and how many drafts of a block were right on average."""
    block, length = draft.config.block_size, rows.tokens.shape[1]
    answer = torch.cat([torch.zeros(len(rows.tokens), 1, dtype=torch.bool), rows.learned[:, :-1]], 1)
    picked = [
        [rng.choice(places) for _ in range(ANCHORS)]
        if (places := line.nonzero().flatten().tolist())
        else [0] * ANCHORS
        for line in answer[:, : length - 1]
    ]
    anchors = torch.tensor(picked)
    found = draft.training_logits(taps, rows.tokens, anchors, target)
    places = anchors.unsqueeze(-1) + torch.arange(block)  # of the token before each draft
    inside = places < length
    at = places.clamp(max=length - 1).flatten(1)
    truth = rows.targets.gather(1, at).view(places.shape)
    counted = rows.learned.gather(1, at).view(places.shape) & inside & answer.gather(1, anchors).unsqueeze(-1)
    counted = counted.cumprod(-1).bool()  # up to the end of the answer
    right = found.logits.argmax(-1) == truth
    of_tokens = F.cross_entropy(found.logits[counted], truth[counted])
    of_confidence = F.binary_cross_entropy_with_logits(found.confidence[counted], right[counted].float())
    asked = counted.any(-1)
    length_right = (right & counted).cumprod(-1).sum(-1)[asked].float().mean().item()
    return of_tokens + CONFIDENCE * of_confidence, length_right
