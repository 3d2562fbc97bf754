"""Days of usage in a store, as calls of some tokens, models and tags would have left them. It asks no model."""

import asyncio
import random
import time
from collections.abc import Sequence

from tenants.open import open_store
from tenants.records.usage import DAY_US, MICRO, UsageRecord

CALLS_A_DAY = 12


async def leave_usage(
    store_url: str, account_id: str, *, days: int, tokens: Sequence[str], models: Sequence[str], tags: Sequence[str]
) -> int:
    """Settles calls of the last `days` days, today among them; returns how many."""
    rng, now_us, records = random.Random(20), int(time.time() * MICRO), list[UsageRecord]()
    for ago in range(days):
        for call in range(CALLS_A_DAY + rng.randrange(CALLS_A_DAY)):
            prompt, completion = rng.randrange(200, 4000), rng.randrange(20, 600)
            cached = prompt * rng.randrange(0, 90) // 100
            records.append(
                UsageRecord(
                    account_id,
                    f"history-{ago}-{call}",
                    now_us // DAY_US - ago,
                    1000 * (prompt - cached) + 200 * cached + 4000 * completion,
                    prompt,
                    cached,
                    completion,
                    "done",
                    rng.choice(tokens),
                    rng.choice(models),
                    now_us - ago * DAY_US,
                    800.0,
                    tags=rng.choice(tags),
                )
            )
    store = open_store(store_url)
    for first in range(0, len(records), 200):
        await store.quotas.settle(records[first : first + 200])
    await store.close()
    return len(records)


def left_usage(store_url: str, account_id: str, **history: object) -> int:
    """`leave_usage`, outside of an event loop."""
    return asyncio.run(leave_usage(store_url, account_id, **history))  # type: ignore[arg-type]
