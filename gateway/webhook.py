"""Sends notices to the URLs that accounts gave, signed, again and again until they are taken.

It does not know what they say. Any account can give any URL, so it may lead to public addresses alone unless the
operator allows others.
"""

import asyncio
import functools
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tenants import outbound
from tenants.limits.soft_caps import signature
from tenants.records.accounts import Notice
from tenants.store.protocol import Clock, NoticeStore, StoreUnavailable

LOOK_S: Final = 2.0
SEND_S: Final = 10.0  # for one try as a whole
LEASE_S: Final = 30.0  # another gateway may try after it, if this one dies meanwhile
AT_ONCE: Final = 16
BACKOFF_S: Final = 5.0  # after the first try; doubles each time
BACKOFF_S_MAX: Final = 3600.0
TRIES_MAX: Final = 20  # over about 10 hours
GONE: Final = 410  # the receiver wants no more

log = logging.getLogger(__name__)


@functools.cache
def public_authorities() -> ssl.SSLContext:
    """The authorities that the system trusts, read once a process: that takes 25 ms."""
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class WebhookSender:
    """One gateway's deliveries. `key_of` gives an account's signing key; `private` allows addresses that are not
    public, and http."""

    store: NoticeStore
    key_of: Callable[[str], bytes]
    clock: Clock
    private: bool
    tls: ssl.SSLContext = field(default_factory=public_authorities)

    async def run(self) -> None:
        """Delivers until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.deliver()
            except StoreUnavailable as problem:
                log.warning("notices_wait", extra={"fields": {"for": str(problem)}})

    async def deliver(self) -> int:
        """Tries every notice that is due once, at most AT_ONCE; returns how many there were."""
        notices = await self.store.claim(self.clock(), LEASE_S, AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for notice in notices:
                group.create_task(self._try(notice))
        return len(notices)

    async def _try(self, notice: Notice) -> None:
        fields = {"notice": notice.id, "account": notice.account_id, "tries": notice.tries + 1}
        try:
            async with asyncio.timeout(SEND_S):
                status = await self._post(notice)
            problem = None if 200 <= status < 300 or status == GONE else f"status {status}"
        except (OSError, ValueError) as error:
            problem = str(error) or "no answer in time"
        try:
            if problem is None:
                await self.store.close(notice.id)
            elif notice.tries + 1 >= TRIES_MAX:
                log.error("notice_given_up", extra={"fields": {**fields, "problem": problem}})
                await self.store.close(notice.id)
            else:
                log.warning("notice_not_taken", extra={"fields": {**fields, "problem": problem}})
                wait_s = min(BACKOFF_S * 2**notice.tries, BACKOFF_S_MAX)
                await self.store.postpone(notice.id, self.clock() + wait_s)
        except StoreUnavailable:
            pass  # it is due again when its lease ends

    async def _post(self, notice: Notice) -> int:
        """Returns the answer's status. The body is not read, and a redirect is not followed. Raises OSError and
        ValueError."""
        if not self.private and not notice.url.lower().startswith("https:"):
            raise ValueError("notices go to https:// addresses alone")
        timestamp = int(self.clock())
        headers = {
            "content-type": "application/json",
            "webhook-id": notice.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self.key_of(notice.account_id), notice, timestamp),
        }
        public_only = not self.private
        async with outbound.send(
            "POST", notice.url, self.tls, headers=headers, content=notice.body, public_only=public_only
        ) as response:
            return response.status_code
