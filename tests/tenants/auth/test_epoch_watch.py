"""Epochs that others raised, as a gateway's watch notices them, on SQLite and on a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import pytest
from msgspec import structs

from tenants.auth import epoch_watch
from tenants.auth.accounts import AccountService
from tenants.records.accounts import Account
from tenants.store.protocol import Store, StoreUnavailable

pytestmark = pytest.mark.anyio
SECRET = b"the server's secret, 32 bytes up"
INTERVAL_S = 0.01


class Heard:
    """What one gateway's watch tells its replicas."""

    def __init__(self, accounts: AccountService) -> None:
        self.epochs: dict[bytes, int] = {}
        self.news = asyncio.Event()
        accounts.epochs.on_raised = self._raised

    def _raised(self, epochs: Mapping[bytes, int]) -> None:
        self.epochs |= epochs
        self.news.set()

    async def until(self, epochs: dict[bytes, int]) -> None:
        async with asyncio.timeout(30):
            while self.epochs != epochs:
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def watching(accounts: AccountService) -> AsyncIterator[Heard]:
    heard = Heard(accounts)
    task = asyncio.create_task(accounts.epochs.run(INTERVAL_S))
    try:
        yield heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def called(accounts: AccountService, name: str = "ann") -> Account:
    """An account with a call that was verified."""
    account = await accounts.create(name)
    _, text = await accounts.mint(account.id, "laptop")
    return (await accounts.verify(text)).account


async def test_a_purge_that_another_process_made_is_told_without_a_call(accounts: AccountService, store: Store) -> None:
    ann, bob = await called(accounts), await called(accounts, "bob")
    async with watching(accounts) as heard:
        await AccountService(store, SECRET).purge_cache(ann.id)
        await heard.until({accounts.scope(ann.id): 1})
        await AccountService(store, SECRET).purge_cache(bob.id)
        await heard.until({accounts.scope(ann.id): 1, accounts.scope(bob.id): 1})


async def test_what_this_process_purges_is_told_at_once_though_no_call_was_seen(accounts: AccountService) -> None:
    heard, ann = Heard(accounts), await accounts.create("ann")
    await accounts.purge_cache(ann.id)
    assert heard.epochs == {accounts.scope(ann.id): 1}


async def test_zero_retention_and_the_end_of_an_account_raise_its_epoch_too(
    accounts: AccountService, store: Store
) -> None:
    ann, bob = await called(accounts), await called(accounts, "bob")
    async with watching(accounts) as heard:
        zero = structs.replace(ann.settings, zero_retention=True)
        await AccountService(store, SECRET).update(ann.id, lambda account: structs.replace(account, settings=zero))
        await heard.until({accounts.scope(ann.id): 1})
        await store.accounts.remove(bob.id)
        await heard.until({accounts.scope(ann.id): 1, accounts.scope(bob.id): epoch_watch._ENDED})


async def test_a_scope_that_accounts_share_is_told_with_their_own(accounts: AccountService) -> None:
    ann, bob = await accounts.create("ann"), await accounts.create("bob")
    for account in (ann, bob):
        members = structs.replace(account.settings, sharing=(ann.id, bob.id))
        await accounts.update(account.id, lambda stored, members=members: structs.replace(stored, settings=members))
    _, text = await accounts.mint(ann.id, "laptop")
    shared = (await accounts.verify(text)).scope
    assert shared not in (accounts.scope(ann.id), accounts.scope(bob.id))
    heard = Heard(accounts)
    await accounts.purge_cache(ann.id)
    assert heard.epochs == {accounts.scope(ann.id): 1, shared: 1}
    _, text = await accounts.mint(bob.id, "laptop")
    await accounts.verify(text)
    await accounts.purge_cache(bob.id)
    assert heard.epochs == {accounts.scope(ann.id): 1, accounts.scope(bob.id): 2, shared: 2}


async def test_a_store_that_is_away_is_asked_again(
    accounts: AccountService, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = await called(accounts)
    asked = asyncio.Event()

    async def away(ids: object) -> list[Account]:
        asked.set()
        raise StoreUnavailable("told to")

    async with watching(accounts) as heard:
        with monkeypatch.context() as patched:
            patched.setattr(store.accounts, "of_ids", away)
            await AccountService(store, SECRET).purge_cache(ann.id)
            async with asyncio.timeout(30):
                await asked.wait()
            assert heard.epochs == {}
        await heard.until({accounts.scope(ann.id): 1})


async def test_no_more_accounts_are_watched_than_so_many(
    accounts: AccountService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_watch, "ACCOUNTS_MAX", 3)
    seen = [await called(accounts, f"ann {number}") for number in range(5)]
    assert list(accounts.epochs._seen) == [account.id for account in seen[2:]]
