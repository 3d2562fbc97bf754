import logging
from typing import Any

import pytest
import redis

from tenants.limits.reconciler import COMPARING_S, Reconciler
from tenants.records.accounts import Account
from tenants.records.limits import Limits
from tenants.records.usage import UsageRecord
from tenants.store.protocol import Store, StoreUnavailable
from tenants.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio
ANN, BOB = "a" * 32, "b" * 32


async def test_each_day_is_compared_once_by_one_gateway_when_it_is_over(
    store: Store, store_url: str, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for account_id in (ANN, BOB):
        await store.accounts.add(Account(account_id, account_id, Limits(), 1))
        await store.quotas.settle([UsageRecord(account_id, "r", clock.day, 10, 1, 0, 2, "done", "k", "m", 7, 1.0)])
    spoil(store, store_url, clock.day)
    gateways = [Reconciler(store, clock), Reconciler(store, clock)]
    for gateway in gateways:
        await gateway.look()
    assert [gateway.different for gateway in gateways] == [0, 0], "today is not over"
    clock.now_s = (clock.day + 1) * 86_400 + 1_800
    await gateways[0].look()
    assert gateways[0].different == 0, "settlements may still come"
    clock.now_s += 1_900
    with caplog.at_level(logging.ERROR):
        for gateway in gateways * 2:
            await gateway.look()
    assert [gateway.compared for gateway in gateways] == [4, 0]
    assert [gateway.different for gateway in gateways] == [1, 0]
    (told,) = [record.fields for record in caplog.records if record.message == "ledger_differs"]  # type: ignore[attr-defined]
    assert told["account"] == ANN
    assert told["counted"] != told["recorded"]


async def test_a_day_whose_comparison_broke_off_is_compared_later(
    store: Store, store_url: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.accounts.add(Account(ANN, ANN, Limits(), 1))
    await store.quotas.settle([UsageRecord(ANN, "r", clock.day, 10, 1, 0, 2, "done", "k", "m", 7, 1.0)])
    clock.now_s = (clock.day + 1) * 86_400 + 3_700
    gateway = Reconciler(store, clock)

    async def away(account_id: str, day: int) -> None:
        raise StoreUnavailable("away")

    reconcile = store.quotas.reconcile
    monkeypatch.setattr(store.quotas, "reconcile", away)
    with pytest.raises(StoreUnavailable):
        await gateway.look()
    monkeypatch.setattr(store.quotas, "reconcile", reconcile)
    if isinstance(store, SqliteStore):
        clock.now_s += COMPARING_S + 1
    else:
        with redis.Redis.from_url(store_url) as client:
            client.delete(f"hearth:{{{ANN}}}:claim:reconciled:{clock.day - 1}")  # Redis has its own clock
    await gateway.look()
    await gateway.look()
    assert gateway.compared == 1


def spoil(store: Store, url: str, day: int) -> None:
    """A counter of Ann's day goes wrong."""
    if isinstance(store, SqliteStore):
        store._file.run("UPDATE days SET micro_neurons = 11 WHERE account_id = ?", (ANN,))
    else:
        with redis.Redis.from_url(url) as client:
            client.hincrby(f"hearth:{{{ANN}}}:day:{day}", "micro_neurons", 1)
