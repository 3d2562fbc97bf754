"""Accounts that are to be removed: the time in which they can be restored, and what goes after it."""

from typing import Any

import pytest

from tenants import deletion
from tenants.audit import SYSTEM, AuditLog
from tenants.auth.accounts import AccountService
from tenants.auth.errors import AccountSuspended, Conflict, NotFound, UnknownToken
from tenants.deletion import DeletionSweep
from tenants.limits.caps import RequestSize
from tenants.records.holds import Hold
from tenants.records.usage import EXPIRED, MICRO, UsageRecord
from tenants.store.protocol import Store
from tests.tenants.conftest import DAY_S, SECRET

pytestmark = pytest.mark.anyio


@pytest.fixture
def audit(store: Store, clock: Any) -> AuditLog:
    return AuditLog(store.audit, SECRET, clock)


@pytest.fixture
def sweep(store: Store, audit: AuditLog, clock: Any) -> DeletionSweep:
    return DeletionSweep(store, audit, clock)


def record(account_id: str, clock: Any, outcome: str = "done") -> UsageRecord:
    return UsageRecord(account_id, "r", clock.day, 30, 3, 2, 5, outcome, "key", "@cf/a/b", clock.day * MICRO, 1.5)


async def test_an_account_is_suspended_at_once_and_removed_after_its_grace(
    accounts: AccountService, store: Store, sweep: DeletionSweep, audit: AuditLog, clock: Any
) -> None:
    await accounts.create("another")
    acme = await accounts.create("acme")
    _, text = await accounts.mint(acme.id, "laptop")
    await store.quotas.settle([record(acme.id, clock)])
    await deletion.delete(accounts, acme.id, clock(), 7 * DAY_S)
    with pytest.raises(AccountSuspended):
        await accounts.verify(text)
    clock.now_s += 7 * DAY_S - 1
    assert await sweep.look() == []
    clock.now_s += 1
    assert await sweep.look() == [acme.id]
    with pytest.raises(NotFound):
        await accounts.get(acme.id)
    with pytest.raises(UnknownToken):
        await accounts.verify(text)
    (entry,) = [entry async for entry in audit.entries(SYSTEM)]
    assert (entry.action, entry.target) == ("account.remove", acme.id)
    assert '"acme"' in entry.detail
    assert set(await store.quotas.usage([acme.id], clock.day - 10, clock.day)) == {acme.id}
    assert (await accounts.create("ACME")).id != acme.id
    assert await sweep.look() == []


async def test_a_restored_account_stays_and_is_served_again(
    accounts: AccountService, sweep: DeletionSweep, clock: Any
) -> None:
    acme = await accounts.create("acme")
    _, text = await accounts.mint(acme.id, "laptop")
    await deletion.delete(accounts, acme.id, clock(), DAY_S)
    with pytest.raises(Conflict, match="restore"):
        await accounts.resume(acme.id)
    with pytest.raises(Conflict, match="already"):
        await deletion.delete(accounts, acme.id, clock())
    restored = await deletion.restore(accounts, acme.id, clock())
    assert (restored.deletion, restored.suspended_at) == (None, None)
    clock.now_s += 2 * DAY_S
    assert await sweep.look() == []
    assert (await accounts.verify(text)).account.id == acme.id
    with pytest.raises(Conflict, match="not to be removed"):
        await deletion.restore(accounts, acme.id, clock())


async def test_what_was_suspended_before_stays_so_when_it_is_restored(accounts: AccountService, clock: Any) -> None:
    acme = await accounts.create("acme")
    suspended = await accounts.suspend(acme.id)
    clock.now_s += 5
    await deletion.delete(accounts, acme.id, clock())
    assert (await deletion.restore(accounts, acme.id, clock())).suspended_at == suspended.suspended_at


async def test_nothing_is_restored_once_it_is_due(accounts: AccountService, clock: Any) -> None:
    acme = await accounts.create("acme")
    await deletion.delete(accounts, acme.id, clock(), 0)
    with pytest.raises(Conflict, match="by now"):
        await deletion.restore(accounts, acme.id, clock())


async def test_an_account_with_open_requests_waits_for_their_end(
    accounts: AccountService, store: Store, sweep: DeletionSweep, clock: Any
) -> None:
    acme = await accounts.create("acme")
    hold = Hold(record(acme.id, clock, EXPIRED), RequestSize(100).micro_neurons, 60 * MICRO)
    await store.quotas.reserve(hold)
    await deletion.delete(accounts, acme.id, clock(), 0, keep_usage=False)
    assert await sweep.look() == []
    await store.quotas.settle([record(acme.id, clock)])
    assert await sweep.look() == [acme.id]
    assert await store.quotas.usage([acme.id], clock.day - 1, clock.day) == {}
