"""Accounts by name, and accounts that are removed: the contract of both stores."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from tenants.open import open_store
from tenants.records.accounts import Account, Deletion, name_key
from tenants.records.limits import NO_LIMITS
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import MICRO, Totals, UsageRecord
from tenants.store.protocol import NameTaken, Store

pytestmark = pytest.mark.anyio
ANN, BOB = "a" * 32, "b" * 32


def account(account_id: str, name: str, created_at: int = 1) -> Account:
    return Account(account_id, name, NO_LIMITS, created_at)


def renamed(before: Account, name: str) -> Account:
    return structs.replace(before, name=name, revision=before.revision + 1)


def test_names_are_compared_without_case_width_and_spaces() -> None:
    assert name_key(" Ａcme  Ltd") == name_key("ACME ltd") == "acme ltd"
    assert name_key("Straße") == name_key("STRASSE")
    assert name_key("acme") != name_key("acme2")


async def test_an_account_is_found_by_its_name_however_that_is_written(store: Store) -> None:
    await store.accounts.add(account(ANN, "Acme Ltd"))
    await store.accounts.add(account(BOB, "beta"))
    assert [found.id for found in await store.accounts.named("acme  LTD")] == [ANN]
    assert list(await store.accounts.named("acme")) == []


async def test_a_name_is_given_once(store: Store) -> None:
    await store.accounts.add(account(ANN, "acme"))
    with pytest.raises(NameTaken) as taken:
        await store.accounts.add(account(BOB, "ACME"))
    assert taken.value.account_id == ANN
    assert await store.accounts.get(BOB) is None
    await store.accounts.add(account(ANN, "acme"))  # again, after an answer that was lost
    assert [one.id for one in await store.accounts.list()] == [ANN]


async def test_a_name_that_was_given_up_is_free_and_a_taken_one_is_refused(store: Store) -> None:
    ann, bob = account(ANN, "acme"), account(BOB, "beta")
    await store.accounts.add(ann)
    await store.accounts.add(bob)
    with pytest.raises(NameTaken):
        await store.accounts.update(renamed(bob, "Acme"))
    assert (await store.accounts.get(BOB)) == bob
    assert await store.accounts.update(renamed(ann, "Acme 2"))
    assert await store.accounts.update(renamed(bob, "acme"))
    assert [found.id for found in await store.accounts.named("acme")] == [BOB]
    assert [found.id for found in await store.accounts.named("acme 2")] == [ANN]


async def test_a_change_that_comes_late_changes_no_name(store: Store) -> None:
    ann = account(ANN, "acme")
    await store.accounts.add(ann)
    assert await store.accounts.update(renamed(ann, "first"))
    assert not await store.accounts.update(renamed(ann, "second"))
    assert list(await store.accounts.named("second")) == []
    assert not await store.accounts.update(renamed(account(BOB, "nobody"), "nobody"))


async def test_of_many_gateways_one_gives_a_name(store: Store, store_url: str, clock: Any) -> None:
    others = [open_store(store_url, clock) for _ in range(3)]
    try:
        stores = [store, *others]
        adding = [stores[i % 4].accounts.add(account(f"{i:032x}", "acme")) for i in range(40)]
        outcomes = await asyncio.gather(*adding, return_exceptions=True)
    finally:
        for other in others:
            await other.close()
    assert sum(outcome is None for outcome in outcomes) == 1
    assert sum(isinstance(outcome, NameTaken) for outcome in outcomes) == 39
    assert len(await store.accounts.list()) == len(await store.accounts.named("acme")) == 1


async def test_names_that_two_accounts_brought_along_are_both_found_until_one_is_renamed(store: Store) -> None:
    ann, bob = account(ANN, "acme", 2), account(BOB, "acme", 1)
    await store.accounts.add(ann)
    await store.accounts.add(bob, shared_name=True)
    assert [found.id for found in await store.accounts.named("acme")] == [BOB, ANN]
    assert await store.accounts.update(structs.replace(bob, revision=2, epoch=1))  # its name stays
    assert await store.accounts.update(renamed(ann, "acme one"))
    assert [found.id for found in await store.accounts.named("acme")] == [BOB]


async def test_a_deletion_is_due_at_its_time_and_not_once_it_was_taken_back(store: Store) -> None:
    ann = structs.replace(account(ANN, "acme"), deletion=Deletion(10, 20, keep_usage=False), revision=2)
    await store.accounts.add(account(ANN, "acme"))
    assert await store.accounts.update(ann)
    assert list(await store.accounts.due_deletions(19)) == []
    assert list(await store.accounts.due_deletions(20)) == [ann]
    assert await store.accounts.update(structs.replace(ann, deletion=None, revision=3))
    assert list(await store.accounts.due_deletions(99)) == []


@pytest.mark.parametrize("keep_usage", [True, False])
async def test_a_removed_account_leaves_its_ledger_where_it_is_to_be_kept(
    store: Store, clock: Any, keep_usage: bool
) -> None:
    for account_id, name in ((ANN, "acme"), (BOB, "beta")):
        await store.accounts.add(account(account_id, name))
        await store.accounts.add_token(ApiToken(f"key-{name}", account_id, "ci", 1), TokenDigest(b"digest", 1))
        used = UsageRecord(account_id, "r", clock.day, 30, 3, 2, 5, "done", "key", "@cf/a/b", clock.day * MICRO, 1.5)
        await store.quotas.settle([used])
        await store.claims.claim(account_id, "key", b"value", 60)
    await store.quotas.remove(ANN, keep_usage=keep_usage)
    await store.accounts.remove(ANN)
    assert [one.id for one in await store.accounts.list()] == [BOB]
    assert await store.accounts.token("key-acme") is None
    assert await store.accounts.token("key-beta") is not None
    assert list(await store.accounts.due_deletions(1 << 40)) == []
    await store.accounts.add(account("c" * 32, "acme"))  # the name is free
    usage = await store.quotas.usage([ANN, BOB], clock.day, clock.day)
    assert set(usage) == ({ANN, BOB} if keep_usage else {BOB})
    assert len(await store.quotas.records(ANN, clock.day)) == keep_usage
    assert await store.quotas.totals(ANN, clock.day) == (Totals(1, 30, 3, 2, 5) if keep_usage else Totals())
    (await store.quotas.reconcile(ANN, clock.day)).check()
    assert await store.claims.claim(ANN, "key", b"other", 60) is None
    assert await store.claims.claim(BOB, "key", b"other", 60) == b"value"
