"""A store that is far away: every call is answered, and none waits for another's round trip."""

import asyncio
import statistics
import time
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from tenants.open import open_store
from tenants.records.accounts import Account
from tenants.records.holds import Granted
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tenants.store.redis import pipeline as module
from tests.support.relay import relay
from tests.support.waiting import until
from tests.tenants.store.redis.test_store import ANN, hold

pytestmark = pytest.mark.anyio
ANSWER_S = module.ANSWER_S  # in service, before the fixture patient_line raises it


@pytest.mark.parametrize("round_trip_ms", [16, 60, 150])
async def test_a_store_far_away_answers_all_and_each_in_one_round_trip(
    empty_redis_url: str, round_trip_ms: int, patient_line: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", ANSWER_S)
    port = urlsplit(empty_redis_url).port or 0
    with relay(port, round_trip_ms / 2000) as (far_port, _):
        store = open_store(f"redis://127.0.0.1:{far_port}/0")
        await store.accounts.add(Account(ANN, "ann", Limits(), 1))
        times: list[float] = []

        async def reserve(number: int) -> None:
            began = time.monotonic()
            assert isinstance(await store.quotas.reserve(hold(f"r{number}", 1)), Granted)
            times.append((time.monotonic() - began) * 1000)

        asking: list[asyncio.Task[None]] = []
        for number in range(40):  # one begins at each quarter of a round trip
            asyncio.get_running_loop().call_later(
                number * round_trip_ms / 4000, lambda n=number: asking.append(asyncio.create_task(reserve(n)))
            )
        await until(lambda: len(asking) == 40)
        await asyncio.gather(*asking)
        await store.close()
    assert len(times) == 40
    assert statistics.median(times) < round_trip_ms * 1.3 + 10, sorted(times)


async def test_the_deadline_follows_a_line_that_becomes_longer(empty_redis_url: str) -> None:
    """Bug elsewhere: what takes longer than the deadline is never measured, and so stays away for good."""
    port = urlsplit(empty_redis_url).port or 0
    with relay(port) as (near_port, line):
        store = open_store(f"redis://127.0.0.1:{near_port}/0")
        await store.ping()
        line.lengthen()

        async def answers() -> bool:
            with suppress(StoreUnavailable):
                await store.ping()
                return True
            return False

        await until(answers, what="the longer line is measured")
        for _ in range(5):
            await store.ping()
        await store.close()
