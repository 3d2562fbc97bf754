"""Reads a state folder's usage ledger beside the running server, and holds it against its counters."""

import asyncio
import time
from pathlib import Path

from tenants.open import open_store
from tenants.records.usage import MICRO, Totals, day_of


def read_totals(folder: Path, account_id: str) -> Totals:
    """What the account used today (UTC). Raises AssertionError where ledger and counters disagree."""

    async def read() -> Totals:
        store = open_store(f"sqlite:{folder / '.hearth' / 'hearth.db'}")
        try:
            balance = await store.quotas.reconcile(account_id, day_of(int(time.time() * MICRO)))
        finally:
            await store.close()
        balance.check()
        return balance.counted

    return asyncio.run(read())
