"""A gateway's quota without the gateway: clients that reserve, work a little and settle, until standard input ends.

python -m benchmarks.tenants.store_worker URL NAME FOLDER SEED CLIENTS ACCOUNTS [BROKEN]

ACCOUNTS is JSON: a list of [account id, neurons of a day or null, strict]. FOLDER/NAME.history gets the events. BROKEN
names a build that is broken on purpose: `silent` says nothing again to a new primary.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from tenants.auth.caller import Caller
from tenants.limits.denials import QuotaExceeded
from tenants.limits.quota import Quota
from tenants.limits.reservation import CallUsage, NeuronPrice, QuotaRequest
from tenants.open import open_store
from tenants.records.accounts import Account, Plan
from tenants.records.grants import Grant
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tenants.store.redis.recent import RecentDecisions
from tests.support.store_history import Event
from tests.support.waiting import until

PRICE: Final = NeuronPrice(input=0, cached_input=0, output=1_000)
TOKENS: Final = 10
HELD: Final = TOKENS * 1_000  # micro-neurons of a request, which uses all of it
PAUSE_S: Final = 0.04
MODEL: Final = "@cf/hearth/ember"


def account(account_id: str, neurons: float | None, strict: bool) -> Account:
    limits = Limits(neurons_per_day=neurons)
    return Account(
        account_id, f"account {account_id[:4]}", limits, 1, plan=Plan("strict" if strict else "open", strict=strict)
    )


class Worker:
    def __init__(self, quota: Quota, name: str, callers: list[Caller], seed: int) -> None:
        self._quota = quota
        self._name = name
        self._callers = callers
        self._random = random.Random(seed)
        self._number = 0
        self.events: list[Event] = []
        self.stopping = False

    async def run(self) -> None:
        """One client."""
        while not self.stopping:
            caller = self._random.choice(self._callers)
            self._number += 1
            await self._call(caller, f"{self._name}-{self._number}")
            await asyncio.sleep(self._random.uniform(0, PAUSE_S))

    async def _call(self, caller: Caller, request_id: str) -> None:
        began_s = time.monotonic()

        def note(kind: Any, micro_neurons: int = HELD) -> None:
            where = (self._name, kind, caller.account.id, request_id)
            self.events.append(Event(*where, began_s, time.monotonic(), micro_neurons))

        try:
            reservation = await self._quota.reserve(caller, request_id, QuotaRequest(MODEL, PRICE, 0, TOKENS))
        except QuotaExceeded:
            note("refused")
            return
        except StoreUnavailable:
            note("unknown")
            return
        note("granted", reservation.held)
        await asyncio.sleep(self._random.uniform(0, PAUSE_S))
        self._quota.checkpoint(reservation, CallUsage(completion_tokens=TOKENS // 2))
        await asyncio.sleep(self._random.uniform(0, PAUSE_S))
        began_s = time.monotonic()
        note("settled")
        self._quota.settle(reservation, CallUsage(completion_tokens=TOKENS, outcome="done"))


async def main(url: str, name: str, folder: str, seed: str, clients: str, accounts: str, broken: str = "") -> None:
    if broken == "silent":
        RecentDecisions.commands = lambda self: []  # type: ignore[method-assign]
    store = open_store(url)
    outbox = Path(folder) / f"{name}.outbox"
    quota = Quota(store.quotas, outbox)
    callers = [
        Caller(one, "key", Grant(), limits=one.limits)
        for one in (account(*each) for each in msgspec.json.decode(accounts))
    ]
    worker = Worker(quota, name, callers, int(seed))
    running = asyncio.create_task(quota.run())
    working = [asyncio.create_task(worker.run()) for _ in range(int(clients))]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    worker.stopping = True
    await asyncio.gather(*working)
    await until(lambda: not quota.unwritten and not any(outbox.glob("*")), what="all settlements are in the store")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await quota.close()
    await store.close()
    (Path(folder) / f"{name}.history").write_bytes(msgspec.json.encode(worker.events))


if __name__ == "__main__":
    os.nice(1)
    asyncio.run(main(*sys.argv[1:]))
