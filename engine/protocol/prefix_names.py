"""Short names of prefixes, the same in gateways and replicas that have one key: at lengths that double, so that a
prompt has a handful. A name chooses a replica and nothing else; which KV is whose is compared token by token there."""

from hashlib import blake2b
from typing import Final

from xxhash import xxh3_128_digest

NAME_BYTES: Final = 8
TOKENS_MIN: Final = 64  # of a prefix that has a name,
TOKENS_MAX: Final = 4096  # and of the longest: what goes on behind it goes where that is


def prefix_names(key: bytes, scope: tuple[int, bytes, int], tokens: bytes | memoryview) -> list[tuple[int, bytes]]:
    """The prefixes of `tokens` (packed u32) that have names, shortest first, each with its number of tokens. `scope`:
    kind, id and epoch. Each is hashed whole, some 20 µs for the most.

    Whoever lacks the key can neither form a name nor tell from one whose it is. The tokens are hashed without it, which
    is faster: who finds two prompts of one hash leads calls astray in a scope of its own, and in no other."""
    kind, id, epoch = scope
    root = b"".join((kind.to_bytes(4, "big"), epoch.to_bytes(8, "big"), len(id).to_bytes(4, "big"), id))
    view, names, count = memoryview(tokens), list[tuple[int, bytes]](), TOKENS_MIN
    while count <= TOKENS_MAX and 4 * count <= len(tokens):
        digest = xxh3_128_digest(view[: 4 * count])  # at once: a hasher's state would keep tokens in freed memory
        names.append((count, blake2b(root + digest, key=key, digest_size=NAME_BYTES).digest()))
        count *= 2
    return names
