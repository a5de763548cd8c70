"""Names of prefixes: a hash of each block of tokens that also covers everything before it.

    key(0) = hash(salt)      key(n) = hash(key(n - 1), tokens of block n)

So two prefixes have one name only when all their tokens and their salt are the same. The names do not depend
on the process, so they name files too.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

HASH_BYTES = 32
_PURPOSE = b"k3 prefix"


class Chain:
    """The keys of a request's prefixes, each computed once, when first asked for.

    tokens: int64 token ids that may be appended to and not changed. salt: what must be equal for two requests
    to share anything. unit: tokens of a block.
    """

    __slots__ = ("_keys", "_tokens", "depth", "stalled_at", "stalls", "unit")

    def __init__(self, tokens: array, salt: str, unit: int) -> None:
        self.unit = unit
        self.depth = 0  # blocks that the index held when asked last
        self.stalls = 0  # how often in a row the request was put off with no longer hit than before
        self.stalled_at = -1
        self._tokens = tokens
        root = salt.encode("utf-8", "surrogatepass")  # half a character is as good a salt as any
        self._keys = [blake2b(root, digest_size=HASH_BYTES, person=_PURPOSE).digest()]

    def key(self, blocks: int) -> bytes:
        """The name of the first ``blocks`` blocks, all of whose tokens are known."""
        keys, unit = self._keys, self.unit
        if blocks >= len(keys):
            tokens = self._tokens
            assert blocks * unit <= len(tokens), f"{blocks} blocks of {unit} of {len(tokens)} tokens"
            for start in range((len(keys) - 1) * unit, blocks * unit, unit):
                block = tokens[start : start + unit].tobytes()
                keys.append(blake2b(keys[-1] + block, digest_size=HASH_BYTES).digest())
        return keys[blocks]
