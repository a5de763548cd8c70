"""How one request wants its tokens chosen: every field checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

MAX_LOGPROBS = 128  # a list of the whole vocabulary per token would be the server's memory, not an answer
MAX_STOP_TOKENS = 1024

RANGES = {  # field: (lowest, highest), both allowed
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "top_k": (0, 2**31),
    "min_tokens": (0, 2**31),
    "max_tokens": (1, 2**31),
    "logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2**63), 2**64 - 1),
}
COUNTS = ("top_k", "min_tokens", "max_tokens", "logprobs", "seed")
OPTIONAL = ("max_tokens", "logprobs", "seed")


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler and when it ends.

    temperature 0 is greedy (ties: the lowest id). top_k 0, top_p 1, min_p 0 and the neutral penalties are
    off. logprobs: how many alternatives are listed beside the chosen token; None asks for nothing, 0 for
    the chosen one. max_tokens None runs to the context limit. min_tokens keeps every stop id out until so
    many are generated. Raises ValueError that begins with the field's name.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name in RANGES:
                check_number(f.name, getattr(self, f.name))
        if self.top_p == 0.0:
            raise ValueError(
                "top_p must be above 0 and at most 1, got 0: use temperature=0 for greedy output"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids lists {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKENS}"
            )
        for token in self.stop_token_ids:
            check_token("stop_token_ids", token)
        for token, bias in self.logit_bias.items():
            check_token("logit_bias", token)
            if not is_number(bias) or not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias of token {token} must be from -100 to 100, got {bias!r}")

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken without chance."""
        return self.temperature == 0.0

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids outside ``range(size)``: they would index a neighbour's logits. Raises
        ValueError.
        """
        for name, tokens in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            outside = [t for t in tokens if not 0 <= t < size]
            if outside:
                raise ValueError(f"{name} holds {outside[:5]}, token ids are from 0 to {size - 1}")
        if self.min_tokens and 2 * len(set(self.stop_token_ids)) > size:
            raise ValueError("stop_token_ids with min_tokens forbid most of the vocabulary: list fewer")


def is_number(value: object) -> bool:
    """An int or float that is not a bool and not NaN."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)  # of any length: some fit no float


def check_number(name: str, value: object) -> None:
    """Hold ``value`` against the type and range of its field; raises ValueError."""
    if value is None and name in OPTIONAL:
        return
    low, high = RANGES[name]
    kind = "a whole number" if name in COUNTS else "a number"
    right_type = is_number(value) and (name not in COUNTS or isinstance(value, int))
    if not right_type or not low <= value <= high:
        raise ValueError(f"{name} must be {kind} from {low} to {high}, got {value!r}")


def check_token(name: str, token: object) -> None:
    """A token id is a whole number that is not negative; raises ValueError."""
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        raise ValueError(f"{name} holds {token!r}, token ids are whole numbers from 0")
