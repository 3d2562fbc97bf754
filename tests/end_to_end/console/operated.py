"""A gateway with ten thousand accounts, stub replicas that move, and an operator, in a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

from engine.protocol.types import Residency
from tenants.records.accounts import Plan
from tenants.records.grants import Grant, Permission
from tenants.records.limits import Limits
from tests.support.admin_api import House, served_admin
from tests.support.many_accounts import HOSTILE, leave_accounts
from tests.support.waiting import until

ACCOUNTS: Final = 10_000
USERS: Final = 200  # of them with usage
DAYS: Final = 30
T = TypeVar("T")


@dataclass
class Operated:
    """`operator` is the text of a token that may do all; `reader` one of a team."""

    house: House
    loop: asyncio.AbstractEventLoop

    @property
    def on_redis(self) -> bool:
        return self.house.gateway.app._tenancy.store_kind == "redis"

    @property
    def base_url(self) -> str:
        return self.house.gateway.base_url

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs beside the gateway, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def call(self, method: str, path: str, body: Any = b"", **headers: str) -> Any:
        """What another operator does meanwhile."""
        answer = self.run(self.house.operate(method, path, body, **headers))
        assert answer.status == 200, answer.content
        return answer.json["result"]


async def fill(house: House) -> None:
    """Plans, accounts, usage, moves, calls and one alert."""
    tenancy, fleet = house.gateway.app._tenancy, house.gateway.fleet
    for name, per_minute in (("team", 600), ("large", 6000)):
        await tenancy.accounts.put_plan(Plan(name, Limits(requests_per_minute=per_minute, neurons_per_month=5e6)))
    await leave_accounts(tenancy.store, ACCOUNTS, USERS, DAYS)
    seen = house.gateway.app._serving.context.fleet
    for residency, toward in (
        (Residency.DEVICE, Residency.MEMORY), (Residency.MEMORY, Residency.MEMORY),
        (Residency.MEMORY, Residency.DEVICE), (Residency.DEVICE, Residency.DEVICE),
    ):  # fmt: skip
        fleet.move(1, residency, toward, device=0)
        await until(lambda r=residency, t=toward: (  # type: ignore[misc]
            seen.replicas()[1].state.residency is r and seen.replicas()[1].state.toward is t
        ))  # fmt: skip
    fleet.move(2, Residency.MEMORY, Residency.DEVICE, 900, device=0)
    fleet.move(3, Residency.DISK, ready_ms=-1, problem=f"it died: {HOSTILE}", quarantined=True)
    for index in range(2):
        fleet.replicas[index].load(waiting=index, blocks=640 * (index + 1), counters={"computed_tokens": 0})
    for _ in range(3):
        await house.gateway.run(prompt="hello", max_tokens=9)
    await house.gateway.settled()
    await until(lambda: seen.replicas()[3].state.quarantined)
    house.gateway.app._serving.context.metrics.alerts.look()


@contextlib.contextmanager
def operated(folder: Path, store_url: str | None = None) -> Iterator[Operated]:
    ready: dict[str, Any] = {}
    begun = threading.Event()

    async def serve() -> None:
        ready["loop"], ready["end"] = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with served_admin(folder, replicas=4, address_failures=10_000, store_url=store_url) as house:
                await fill(house)
                grant = Grant((Permission.OPERATOR, Permission.INFERENCE))
                _, house.operator = await house.gateway.accounts.mint(house.operator_id, "console", grant=grant)
                ready["house"] = house
                begun.set()
                await ready["end"].wait()
        finally:
            begun.set()

    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    assert begun.wait(120)
    try:
        yield Operated(ready["house"], ready["loop"])
    finally:
        ready["loop"].call_soon_threadsafe(ready["end"].set)
        thread.join(30)
