"""What a leader and its followers tell whoever watches them: nobody, by default."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from .recorder import Mark


class Unwatched:
    """Nobody watches. A watch has the same methods, on every rank."""

    def step(self, kind: str, rows: int = 0) -> AbstractContextManager[object]:
        """Entered when a command of this kind is known and left when it is done here, or has failed. Around
        the commands of one turn of the engine there is another one. rows: of tokens.
        """
        return nullcontext()

    def mark(self) -> Mark:
        """This rank's collectives so far; asked between two commands."""
        return Mark(0, 0)

    def check(self, mine: Mark, leaders: Mark) -> None:
        """Raise when the marks of one moment differ; asked on a follower before it obeys a command."""

    def why(self, error: Exception) -> str | None:
        """Why a step failed with an error that only says that a collective broke off; None for any other,
        and where nobody knows.
        """
        return None
