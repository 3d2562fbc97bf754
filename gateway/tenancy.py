"""The tenants' side of one gateway: its store, and what keeps accounts, limits and notices. It serves nothing."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config import Config
from gateway.webhook import WebhookSender
from tenants.auth.accounts import AccountService
from tenants.auth.issuers import JwtVerifier
from tenants.limits.quota import Quota
from tenants.limits.reconciler import Reconciler
from tenants.limits.soft_caps import SoftCaps, notice_signer
from tenants.open import open_store
from tenants.store.protocol import Clock, Store

BackgroundJob = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Tenancy:
    """`secret` is the server's, the same for all gateways that share the store. `clock` is the gateway's calendar."""

    store: Store
    secret: bytes
    clock: Clock
    accounts: AccountService
    quota: Quota
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
    return Tenancy(
        store=store,
        secret=secret,
        clock=clock,
        accounts=AccountService(store, secret, clock, issuers=issuers),
        quota=quota,
        soft_caps=soft_caps,
        reconciler=reconciler,
        background=(quota.run, issuers.run, soft_caps.run, webhook.run, reconciler.run),
    )
