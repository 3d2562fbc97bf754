"""Names of blocks that leave their replica: nobody forms one without the key, all that the KV depends on, and every
token up to the block's end. It knows no blocks.

    root    HMAC-SHA-256 under the key, over the fields of the namespace: scope, revisions, tokenizer, layout, epoch
    name    SHA-256 over the name before it, or the root, and the tokens of the block

A raised epoch, another revision or another layout has another root: what was named before cannot be asked for again.
"""

import hmac
from hashlib import sha256
from typing import Final

from prefixcache.namespace import Namespace

NAME_BYTES: Final = 32


class BlockNames:
    """Names under one key. Whoever has a name and tokens can form later names: both stay with their owner."""

    def __init__(self, key: bytes) -> None:
        assert len(key) >= NAME_BYTES, "a key that could be guessed"
        self._key = key

    def root(self, namespace: Namespace) -> bytes:
        """What the names of a namespace begin with. Fields are told apart by their lengths: none runs into the next."""
        fields = [field if isinstance(field, bytes) else str(field).encode() for field in namespace]
        packed = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        return hmac.digest(self._key, packed, "sha256")


def next_name(name: bytes, packed: bytes | bytearray | memoryview) -> bytes:
    """The name of the block with these token bytes, behind the block or root of this name. Some 1 µs."""
    return sha256(name + packed).digest()


def split_names(names: bytes) -> list[bytes]:
    """Names that lie one behind the other."""
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
