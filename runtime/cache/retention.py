"""Which states are worth a slot after the step that made them."""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoints import Grid, last_hit


@dataclass(frozen=True)
class Retention:
    """Keep the states at ends of prompts, at junctions, and on a regular grid.

    interval: tokens from one regular state to the next, a multiple of the block. None: the block. 0: no
    regular ones. Raises ValueError for an interval whose states are never made.
    """

    grid: Grid
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and (self.interval < 0 or self.interval % self.grid.block):
            raise ValueError(
                f"retention_interval={self.interval} is neither 0 nor a multiple of "
                f"block_size={self.grid.block}, where states are made"
            )

    def wants(self, tokens: int, prompt: int, total: int, junction: int) -> bool:
        """Whether the state after ``tokens`` tokens stays.

        prompt: tokens of the prompt. total: tokens known when they were run. A prompt has two ends: the last
        hit of the same prompt sent again, and that of a longer one which begins with it.
        """
        unit = self.grid.unit
        if tokens in (junction, last_hit(prompt, unit), prompt // unit * unit, last_hit(total, unit)):
            return True
        interval = self.grid.block if self.interval is None else self.interval
        return interval > 0 and tokens % interval == 0
