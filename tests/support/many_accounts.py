"""Thousands of accounts in a store, and days of usage of some of them. It asks no model."""

import time
from collections.abc import Sequence
from typing import Final

from tenants.records.accounts import Account
from tenants.records.limits import NO_LIMITS
from tenants.records.usage import DAY_US, MICRO, UsageRecord
from tenants.store.protocol import Store, StoreUnavailable
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

HOSTILE: Final = "<img src=x onerror=\"document.title='run'\">"


async def leave_accounts(store: Store, accounts: int, users: int, days: int) -> None:
    """Accounts with names, the first by name hostile, and usage of those that come first by name."""
    now_us = int(time.time() * MICRO)
    names = [f"{HOSTILE}", *(f"team {number:05} of the works" for number in range(1, accounts))]
    ids = [f"{number:032x}" for number in range(accounts)]
    for number, name in enumerate(names):
        await store.accounts.add(Account(ids[number], name, NO_LIMITS, 1_700_000_000 + number))
    records = [
        UsageRecord(
            *(account_id, f"h-{ago}", now_us // DAY_US - ago, (n % 17 + 1) * (days - ago + n % 5) * MICRO // 10),
            *(900 + n, 300 + n, 120 + ago, "done", "key", MODEL if n % 3 else f"@cf/{HOSTILE}", now_us, 700.0),
        )
        for n, account_id in enumerate(ids[:users])
        for ago in range(days)
    ]
    for first in range(0, len(records), 100):
        part = records[first : first + 100]
        await until(lambda part=part: _settled(store, part))  # type: ignore[misc]


async def _settled(store: Store, records: Sequence[UsageRecord]) -> bool:
    """Whether it answered in time, which a store on a busy machine need not; it settles nothing twice."""
    try:
        await store.quotas.settle(records)
    except StoreUnavailable:
        return False
    return True
