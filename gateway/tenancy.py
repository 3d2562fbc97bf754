"""The tenants' side of one gateway: its store, and what keeps accounts, limits and notices. It serves nothing."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.config import Config
from gateway.webhook import WebhookSender
from tenants.auth.accounts import AccountService
from tenants.auth.issuers import JwtVerifier
from tenants.limits.local_rate import LocalRate
from tenants.limits.quota import Quota
from tenants.limits.reconciler import Reconciler
from tenants.limits.soft_caps import SoftCaps, notice_signer
from tenants.open import open_store
from tenants.store.protocol import Clock, Store

BYTES_AT_ONCE_S: Final = 4  # an account may send so many seconds' bytes at once, and always one body of any size
BackgroundJob = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Tenancy:
    """`secret` is the server's, the same for all gateways that share the store. `clock` is the gateway's calendar;
    `account_bytes` are those of the bodies that each account sends to this gateway."""

    store: Store
    secret: bytes
    clock: Clock
    accounts: AccountService
    quota: Quota
    account_bytes: LocalRate
    soft_caps: SoftCaps
    reconciler: Reconciler
    background: tuple[BackgroundJob, ...]  # run for as long as the gateway does

    async def close(self) -> None:
        """Writes what is settled, then closes the store."""
        await self.quota.close()
        await self.store.close()


def open_tenancy(config: Config, secret: bytes, clock: Clock = time.time) -> Tenancy:
    """Opens the store that the config names. Raises StoreUnavailable and ValueError, as `open_store` does."""
    store = open_store(config.store_url)
    issuers, soft_caps = JwtVerifier(config.issuers, clock), SoftCaps(store.notices, clock)
    webhook = WebhookSender(store.notices, notice_signer(secret), clock, private=config.server.private_notices)
    quota, reconciler = Quota(store.quotas, Path(config.outbox_folder), clock), Reconciler(store, clock)
    room_bytes = max(BYTES_AT_ONCE_S * config.server.account_bytes, config.server.body_bytes_max)
    return Tenancy(
        store=store,
        secret=secret,
        clock=clock,
        accounts=AccountService(store, secret, clock, issuers=issuers),
        quota=quota,
        account_bytes=LocalRate(config.server.account_bytes, room_bytes, time.monotonic),
        soft_caps=soft_caps,
        reconciler=reconciler,
        background=(quota.run, issuers.run, soft_caps.run, webhook.run, reconciler.run),
    )
