"""Soft caps: a notice once a window when a part of an account's neurons is used. It does not send them."""

import asyncio
import hmac
import logging
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

import msgspec

from tenants.limits.caps import LimitStatus
from tenants.records.accounts import Account, Notice
from tenants.records.holds import BUDGETS, DenialReason
from tenants.records.usage import MICRO, day_of, first_of_month
from tenants.store.protocol import Clock, NoticeStore, StoreUnavailable

PASSED_MAX: Final = 50_000  # thresholds remembered, so that the store is asked once for each
PENDING_MAX: Final = 1_000  # notices that wait for the store; more are told by the next request that passes them
WRITE_S: Final = 1.0

log = logging.getLogger(__name__)


class SoftCaps:
    """Thresholds that one gateway saw passed. Everything here is called from one event loop."""

    def __init__(self, store: NoticeStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._sent_ids: OrderedDict[str, None] = OrderedDict()
        self._pending: dict[str, Notice] = {}

    def check(self, account: Account, statuses: Iterable[LimitStatus]) -> None:
        """Queues a notice for each threshold that its neuron limits have passed. Never raises; takes a few
        microseconds without notices."""
        notices = account.settings.notices
        if notices is None:
            return
        for status in statuses:
            if status.measure not in BUDGETS:
                continue
            used = 1.0 if status.allowed <= 0 else 1 - status.remaining / status.allowed
            for part in notices.at:
                if used >= part - 1e-9:
                    self._queue_notice(account, notices.url, status, part)

    def _queue_notice(self, account: Account, url: str, status: LimitStatus, part: float) -> None:
        now = self._clock()
        day = day_of(int(now * MICRO))
        first = day if status.measure is DenialReason.NEURONS_PER_DAY else first_of_month(day)
        window = datetime.fromtimestamp(first * 86_400, UTC).strftime("%Y-%m-%d")
        key = f"{account.id} {status.subject} {status.measure} {window} {part} {status.allowed}"
        id = f"notice_{sha256(key.encode()).hexdigest()[:32]}"
        if id in self._sent_ids or id in self._pending or len(self._pending) >= PENDING_MAX:
            return
        body = {
            "type": "limit.used",
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
            "data": {
                "account_id": account.id,
                "limit": status.measure.value,
                "subject": status.subject,
                "window": window,
                "part": part,
                "allowed": status.allowed,
                "used_or_reserved": round(status.allowed - status.remaining, 6),
            },
        }
        self._pending[id] = Notice(id, account.id, url, msgspec.json.encode(body), now)

    async def run(self) -> None:
        """Writes queued notices to the store, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_S)
            try:
                await self.flush()
            except StoreUnavailable as problem:
                log.warning("notices_wait", extra={"fields": {"for": str(problem), "count": len(self._pending)}})

    async def flush(self) -> None:
        """Writes all notices so far to the store. Raises StoreUnavailable; unwritten notices stay."""
        for id, notice in list(self._pending.items()):
            await self._store.add(notice)
            del self._pending[id]
            self._sent_ids[id] = None
            if len(self._sent_ids) > PASSED_MAX:
                self._sent_ids.popitem(last=False)


def notice_signer(secret: bytes) -> Callable[[str], bytes]:
    """A function from an account's id to the key that signs its notices; `secret` is the server's."""
    root = hmac.digest(secret, b"hearth notices", "sha256")
    return lambda account_id: hmac.digest(root, account_id.encode(), "sha256")


def webhook_secret(key: bytes) -> str:
    """The key in the form of the Standard Webhooks specification, for receivers that check signatures."""
    return f"whsec_{b64encode(key).decode()}"


def signature(key: bytes, notice: Notice, timestamp: int) -> str:
    """The `webhook-signature` of the Standard Webhooks specification, version 1."""
    signed = f"{notice.id}.{timestamp}.".encode() + notice.body
    return f"v1,{b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
