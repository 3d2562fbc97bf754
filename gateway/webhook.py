"""Sends notices to the addresses that accounts gave, signed, again and again until they are taken.

It does not know what they say. An address is an account's own word, so it may lead to public addresses alone unless the
operator allows others: the name is resolved once, every answer is looked at, and the connection goes to what was seen.
"""

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from tenants.limits.soft_caps import signature
from tenants.records.notices import Notice
from tenants.store.protocol import Clock, Store, StoreUnavailable

LOOK_S: Final = 2.0
SEND_S: Final = 10.0  # for one try as a whole
LEASE_S: Final = 30.0  # another gateway may try after it, if this one dies meanwhile
AT_ONCE: Final = 16
BACKOFF_S: Final = 5.0  # after the first try; doubles each time
BACKOFF_S_MAX: Final = 3600.0
TRIES_MAX: Final = 20  # over about 10 hours
GONE: Final = 410  # the receiver wants no more

log = logging.getLogger(__name__)


class DeliveryRefused(Exception):
    """The address may not be called, or does not take the notice."""


class WebhookSender:
    """One gateway's deliveries. `key_of` gives an account's signing key."""

    def __init__(
        self,
        store: Store,
        key_of: Callable[[str], bytes],
        clock: Clock,
        *,
        private: bool,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._store = store
        self._key_of = key_of
        self._clock = clock
        self._private = private
        self._tls = tls or ssl.create_default_context()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.deliver()
            except StoreUnavailable as problem:
                log.warning("notices_wait", extra={"fields": {"for": str(problem)}})

    async def deliver(self) -> int:
        """One try of every notice that is due, at most AT_ONCE; returns how many there were."""
        notices = await self._store.take_notices(self._clock(), LEASE_S, AT_ONCE)
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
        except (OSError, ValueError, DeliveryRefused, TimeoutError) as error:
            problem = str(error) or "no answer in time"
        try:
            if problem is None:
                await self._store.close_notice(notice.id)
            elif notice.tries + 1 >= TRIES_MAX:
                log.error("notice_given_up", extra={"fields": {**fields, "problem": problem}})
                await self._store.close_notice(notice.id)
            else:
                log.warning("notice_not_taken", extra={"fields": {**fields, "problem": problem}})
                wait_s = min(BACKOFF_S * 2**notice.tries, BACKOFF_S_MAX)
                await self._store.postpone_notice(notice.id, self._clock() + wait_s)
        except StoreUnavailable:
            pass  # it is due again when its lease ends

    async def _post(self, notice: Notice) -> int:
        """The answer's status; the rest of it is not read, and a redirect is not followed."""
        parts = urlsplit(notice.url)
        assert parts.hostname is not None, "Notices were checked"
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        address = await self._address(parts.hostname, port, secure)
        tls, name = (self._tls, parts.hostname) if secure else (None, None)
        reader, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=name)
        try:
            writer.write(self._request(notice, parts.netloc, parts.path or "/", parts.query))
            words = (await reader.readline()).split(b" ", 2)
            if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
                raise DeliveryRefused("what answers is no HTTP server")
            return int(words[1])
        finally:
            writer.transport.abort()

    def _request(self, notice: Notice, host: str, path: str, query: str) -> bytes:
        timestamp = int(self._clock())
        lines = (
            f"POST {path}{'?' if query else ''}{query} HTTP/1.1",
            f"host: {host}",
            "content-type: application/json",
            f"content-length: {len(notice.body)}",
            f"webhook-id: {notice.id}",
            f"webhook-timestamp: {timestamp}",
            f"webhook-signature: {signature(self._key_of(notice.account_id), notice, timestamp)}",
            "connection: close",
        )
        return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + notice.body

    async def _address(self, host: str, port: int, secure: bool) -> str:
        """One of the host's addresses. Raises Refused where one of them is not public, OSError where there is none."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port)
        addresses = [str(entry[4][0]) for entry in found]
        if not self._private:
            if not secure:
                raise DeliveryRefused("notices go to https:// addresses alone")
            inner = [address for address in addresses if not _public(address)]
            if inner:
                raise DeliveryRefused(f"{host} is {inner[0]}, which is no public address")
        return addresses[0]


def _public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found.sixtofour or found
    return found.is_global and not found.is_multicast
