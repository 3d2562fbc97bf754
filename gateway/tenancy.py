"""The tenants' side of one gateway: its store, and what keeps accounts, limits and notices. It serves nothing."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gateway.background import BackgroundJob
from gateway.other_cells import cell_name, open_cells
from gateway.settings.config import Config, SettingsError
from gateway.webhook import WebhookSender
from tenants.audit import AuditLog
from tenants.auth.accounts import AccountService
from tenants.auth.issuers import JwtVerifier
from tenants.deletion import DeletionSweep
from tenants.limits.local_rate import LocalRate
from tenants.limits.quota import Quota
from tenants.limits.reconciler import Reconciler
from tenants.limits.soft_caps import SoftCaps, notice_signer
from tenants.open import open_store
from tenants.store.protocol import Clock, Store

BYTES_AT_ONCE_S: Final = 4  # an account may send so many seconds' bytes at once, and always one body of any size


@dataclass(frozen=True, slots=True)
class Tenancy:
    """`secret` is the server's, the same for all gateways that share the store. `clock` is the gateway's calendar;
    `account_bytes` are those of the bodies that each account sends to this gateway."""

    store: Store
    store_kind: str  # sqlite or redis
    secret: bytes
    clock: Clock
    accounts: AccountService
    quota: Quota
    account_bytes: LocalRate
    soft_caps: SoftCaps
    reconciler: Reconciler
    background: Mapping[str, BackgroundJob]

    async def close(self) -> None:
        """Writes what is settled, then closes the store."""
        await self.quota.close()
        await self.store.close()


def open_tenancy(config: Config, secret: bytes, clock: Clock = time.time) -> Tenancy:
    """Opens the store that the config names. Raises StoreUnavailable as `open_store` does, and SettingsError."""
    try:
        store = open_store(config.store_url)
    except ValueError as error:
        raise SettingsError(f"[store] of hearth.toml: {error}") from None
    issuers, soft_caps = JwtVerifier(config.issuers, clock), SoftCaps(store.notices, clock)
    webhook = WebhookSender(store.notices, notice_signer(secret), clock, private=config.server.private_notices)
    cells = open_cells(config, store)
    borrower, others = (None, None) if cells is None else (cells.borrower, cells.lines)
    quota = Quota(store.quotas, Path(config.outbox_folder), clock, borrower)
    reconciler = Reconciler(store, clock)
    accounts = AccountService(store, secret, clock, issuers=issuers, cell=cell_name(config), others=others)
    deletions = DeletionSweep(store, AuditLog(store.audit, secret), clock)
    room_bytes = max(BYTES_AT_ONCE_S * config.server.account_bytes, config.server.body_bytes_max)
    return Tenancy(
        store=store,
        store_kind="sqlite" if config.store_url.startswith("sqlite:") else "redis",
        secret=secret,
        clock=clock,
        accounts=accounts,
        quota=quota,
        account_bytes=LocalRate(config.server.account_bytes, room_bytes, time.monotonic),
        soft_caps=soft_caps,
        reconciler=reconciler,
        background={
            "quota": quota.run,
            "issuers": issuers.run,
            "soft_caps": soft_caps.run,
            "webhook": webhook.run,
            "reconciler": reconciler.run,
            "deletions": deletions.run,
            "epochs": partial(accounts.epochs.run, config.server.purge_s),
            **({} if cells is None else cells.jobs(accounts, clock)),
        },
    )
