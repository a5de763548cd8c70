"""Whether an error says only that a collective broke off, which happens to a rank and is never the cause.

    "run failed on rank 0: RuntimeError: [../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:32396 ..."
        -> the words of a backend, with its files and addresses: for the log
    "run failed on rank 0: ValueError: no kernel"
        -> what went wrong here: for everybody

What a backend says depends on which of two sockets noticed first. Why another rank is gone is found by
watch.py, which looks at its process and hears what it said last.
"""

from __future__ import annotations

import re

BACKEND = re.compile(r"\bRuntimeError: .*gloo|\bDist\w*Error: ", re.IGNORECASE | re.DOTALL)
UNKNOWN = "another rank, or the way to it, is gone"


def in_words(error: BaseException) -> str:
    """``ValueError: no kernel``"""
    return f"{type(error).__name__}: {error}"


def broke_off(said: str | None) -> bool:
    """Whether what was said of a failure, by :func:`in_words`, is a backend's."""
    return said is not None and BACKEND.search(said) is not None
