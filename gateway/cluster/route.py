"""The choice of a replica for a request: by cache affinity, bounded by load. It opens no connection."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

KEY_TOKENS = 64
BALANCE = 1.25
LIGHT_LOAD = 4  # sequences that a replica runs together at little cost; below it the cache counts for more


class Candidate(NamedTuple):
    """A replica that can serve. `load` is the number of its running and waiting sequences."""

    name: str
    load: int


def pick(candidates: Sequence[Candidate], scope: bytes, tokens: bytes, session: bytes = b"") -> int:
    """The index of the replica for a prompt of this scope; `tokens` is packed u32.

    A `session` named by the caller takes the place of the tokens, within its scope.

    Rendezvous hashing on (scope, first tokens) sends equal system prompts of one tenant to one replica, and moves
    only the keys of a replica that goes. A replica whose load would pass BALANCE × the mean, and LIGHT_LOAD, is
    passed over for the next in the key's own order (consistent hashing with bounded loads, Mirrokni et al. 2016).
    Deterministic, O(n log n). xxhash only spreads here: a collision costs time and nothing else.
    """
    assert candidates, "the caller waits until there is one"
    if len(candidates) == 1:
        return 0
    mean = (sum(candidate.load for candidate in candidates) + 1) / len(candidates)
    bound = max(math.ceil(BALANCE * mean), LIGHT_LOAD)
    key = xxhash.xxh3_64_intdigest(session or _key(tokens), seed=xxhash.xxh3_64_intdigest(scope))
    ranked = sorted(
        (xxhash.xxh3_64_intdigest(candidate.name.encode(), seed=key), index)
        for index, candidate in enumerate(candidates)
    )
    for _, index in reversed(ranked):
        if candidates[index].load + 1 <= bound:
            return index
    return min(range(len(candidates)), key=lambda index: candidates[index].load)


def _key(tokens: bytes) -> bytes:
    """The first tokens, cut down to a power of two below KEY_TOKENS, so that short prompts that grow keep their key
    from 64 tokens on."""
    count = len(tokens) // 4
    return tokens[: 4 * KEY_TOKENS] if count >= KEY_TOKENS else tokens[: 4 << max(count.bit_length() - 1, 0)]
