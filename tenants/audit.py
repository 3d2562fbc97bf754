"""The audit log: who did what to an account, in a chain that shows when it was altered. It does not know who may ask.

Each entry's seal is HMAC-SHA256, under a key of the server's secret, of the seal before it and of the entry itself. So
an entry cannot be changed, taken out or put in without the secret, and `verify` says where it was tried. A chain
alone cannot show that its end was cut off: keep a head that `verify` returned, and give it to the next one.

An account's entries are one chain; the chain of "" has what concerns no one account, such as plans.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import structs

from tenants.records.accounts import AuditEntry
from tenants.store.protocol import AuditStore, Clock

SYSTEM: Final = ""  # the chain of what concerns no one account
DETAIL_BYTES_MAX: Final = 4096
APPENDS_MAX: Final = 50  # tries to append beside other writers
PAGE: Final = 500

_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """`problem` is None where all `entries` are as they were written; else it is that of the entry `seq`.

    `head` is the last good seal, "" of an empty chain.
    """

    entries: int
    head: str
    seq: int = 0
    problem: str | None = None


def fit_detail(detail: dict[str, Any], **kept: Any) -> dict[str, Any]:
    """The detail, or, where it is too long, its digest and the fields `kept`."""
    encoded = _encode(detail)
    if len(encoded) <= DETAIL_BYTES_MAX:
        return detail
    return {**kept, "detail_sha256": hashlib.sha256(encoded).hexdigest()}


class AuditLog:
    """The chains of one store. `secret` is the server's."""

    def __init__(self, store: AuditStore, secret: bytes, clock: Clock = time.time) -> None:
        self._store = store
        self._key = hmac.digest(secret, b"hearth audit", "sha256")
        self._clock = clock

    async def write(self, account_id: str, actor: str, action: str, target: str, **detail: Any) -> AuditEntry:
        """Stores an entry before it returns: call it before the caller hears of the effect.

        `actor` is a token's id or `command line`, `action` like `token.create`, `target` the id of what was acted on;
        `detail` is JSON, without any prompt or secret. Raises StoreUnavailable, ValueError for too much detail.
        """
        written = _encode(detail).decode()
        if len(written.encode()) > DETAIL_BYTES_MAX:
            raise ValueError(f"the detail of {action} is longer than {DETAIL_BYTES_MAX} bytes")
        for _ in range(APPENDS_MAX):
            head = await self._store.head(account_id)
            seq, before = (head.seq + 1, head.seal) if head is not None else (1, "")
            entry = AuditEntry(account_id, seq, int(self._clock()), actor, action, target, written, "")
            sealed = structs.replace(entry, seal=self._seal(before, entry))
            if await self._store.append(sealed):
                return sealed
        raise RuntimeError(f"{APPENDS_MAX} others wrote to the audit log of {account_id!r} first")

    async def entries(self, account_id: str, first_seq: int = 1) -> AsyncIterator[AuditEntry]:
        """Reads the chain from `first_seq` on, in pages."""
        while page := await self._store.entries(account_id, first_seq, PAGE):
            for entry in page:
                yield entry
            first_seq += len(page)
            await asyncio.sleep(0)  # SQLite answers without a pause, and a long chain would stop all streams

    async def verify(
        self, account_id: str, known_head: str | None = None, on_entry: Callable[[AuditEntry], None] | None = None
    ) -> ChainVerdict:
        """Walks the chain. A head that was returned before must be in it: else its end was cut off."""
        seq, before, head_found = 0, "", known_head in (None, "")
        async for entry in self.entries(account_id):
            seq += 1
            if (entry.seq, entry.account_id) != (seq, account_id):
                return ChainVerdict(seq - 1, before, seq, f"entry {entry.seq} of {entry.account_id!r} stands here")
            if not hmac.compare_digest(entry.seal, self._seal(before, entry)):
                return ChainVerdict(seq - 1, before, seq, "this entry, or the one before it, is not what was written")
            before = entry.seal
            head_found = head_found or before == known_head
            if on_entry is not None:
                on_entry(entry)
        if not head_found:
            return ChainVerdict(seq, before, seq + 1, "the head that was told before is missing: the end was cut off")
        return ChainVerdict(seq, before)

    def _seal(self, before: str, entry: AuditEntry) -> str:
        text = _encode([before, structs.asdict(structs.replace(entry, seal=""))])
        return hmac.digest(self._key, text, "sha256").hex()
