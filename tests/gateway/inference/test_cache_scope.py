"""Whose cached prefixes a request may share, how long they are kept, and where it may be served."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.protocol.frames import Submit
from engine.protocol.types import Scope, ScopeKind
from gateway.inference.cache_scope import scope_of, terms_of
from gateway.observability.logging import EventFormatter
from gateway.text.tokenizer import ModelTokenizer
from tenants.auth.accounts import AccountService
from tenants.auth.caller import Caller
from tenants.open import open_store
from tenants.records.accounts import Plan, Settings
from tenants.records.limits import Limits
from tests.support.served_gateway import SECRET, Served, looped, served

TEN: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}


class World:
    """Accounts in a store, and what a request of one of their tokens says to a replica."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_800_000_000.0
        self.accounts = AccountService(open_store(f"sqlite:{folder / 'hearth.db'}"), SECRET, lambda: self.now)
        self.texts: dict[str, str] = {}

    async def account(self, name: str, settings: Settings = Settings()) -> str:  # noqa: B008 frozen
        account = await self.accounts.create(name)
        _, self.texts[account.id] = await self.accounts.mint(account.id, "t")
        await self.settings(account.id, settings)
        return account.id

    async def settings(self, account_id: str, settings: Settings) -> None:
        await self.accounts.update(account_id, lambda account: structs.replace(account, settings=settings))
        self.now += 1

    async def caller(self, account_id: str) -> Caller:
        self.now += 1
        return await self.accounts.verify(self.texts[account_id])

    async def scope(self, account_id: str, user: str | None = None, zero: bool = False) -> Scope:
        return scope_of(await self.caller(account_id), user, zero)


@looped
async def test_accounts_share_nothing_by_themselves(tmp_path: Path) -> None:
    world = World(tmp_path)
    ann, bob = await world.account("ann"), await world.account("bob")
    mine, theirs = await world.scope(ann), await world.scope(bob)
    assert mine.kind is theirs.kind is ScopeKind.TENANT
    assert mine.id != theirs.id
    assert mine == await world.scope(ann, user="somebody"), "the caller's words change nothing here"


@looped
async def test_users_are_kept_apart_where_the_account_wants_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    ann = await world.account("ann", Settings(cache_scope="user"))
    bob = await world.account("bob", Settings(cache_scope="user"))
    first, second = await world.scope(ann, "u1"), await world.scope(ann, "u2")
    assert first.kind is ScopeKind.USER
    assert first.id != second.id
    assert first == await world.scope(ann, "u1")
    assert first.id != (await world.scope(bob, "u1")).id
    assert first.account == second.account != (await world.scope(bob, "u1")).account, "their turn is the account's"
    for nobody in (None, ""):
        assert (await world.scope(ann, nobody)).kind is ScopeKind.REQUEST, "without a user nothing is shared"


@looped
async def test_a_scope_of_requests_shares_with_nobody(tmp_path: Path) -> None:
    world = World(tmp_path)
    ann = await world.account("ann", Settings(cache_scope="request"))
    scope = await world.scope(ann, "u1")
    assert (scope.kind, scope.id) == (ScopeKind.REQUEST, b"")
    assert scope.account != b""


@looped
async def test_a_group_shares_once_all_its_members_have_agreed_to_the_very_same(tmp_path: Path) -> None:
    world = World(tmp_path)
    ann, bob, eve = [await world.account(name) for name in ("ann", "bob", "eve")]
    alone = {one: (await world.scope(one)).id for one in (ann, bob, eve)}
    await world.settings(ann, Settings(sharing=(ann, bob)))
    assert (await world.scope(ann)).id == alone[ann], "bob has not agreed"
    await world.settings(eve, Settings(sharing=(ann, bob, eve)))
    await world.settings(bob, Settings(sharing=(bob, ann)))
    shared = await world.scope(ann)
    assert shared.id == (await world.scope(bob)).id
    assert shared.id not in alone.values()
    assert shared.account != (await world.scope(bob)).account, "each takes its own turns"
    assert (await world.scope(eve)).id == alone[eve], "nobody agreed to eve"
    await world.settings(bob, Settings(sharing=(bob, ann, eve)))
    assert [(await world.scope(one)).id for one in (ann, bob, eve)] == list(alone.values()), "bob left"
    await world.settings(ann, Settings(sharing=(eve, bob, ann)))
    assert len({(await world.scope(one)).id for one in (ann, bob, eve)}) == 1
    await world.settings(eve, Settings(sharing=(bob, ann)))
    assert (await world.scope(eve)).id == alone[eve], "who names a group without itself is in none"


@looped
async def test_a_purge_gives_a_scope_that_finds_nothing_of_before(tmp_path: Path) -> None:
    world = World(tmp_path)
    ann = await world.account("ann")
    before = await world.scope(ann)
    await world.accounts.purge_cache(ann)
    after = await world.scope(ann)
    assert (after.id, after.epoch) == (before.id, before.epoch + 1)


@looped
async def test_a_purge_of_one_of_a_group_hides_what_all_have_cached_and_they_go_on_sharing(tmp_path: Path) -> None:
    world = World(tmp_path)
    ann, bob = await world.account("ann"), await world.account("bob")
    for one in (ann, bob):
        await world.settings(one, Settings(sharing=(ann, bob)))
    epochs = []
    for purged in (ann, ann, bob):
        await world.accounts.purge_cache(purged)
        mine, theirs = await world.scope(ann), await world.scope(bob)
        assert (mine.id, mine.epoch) == (theirs.id, theirs.epoch)
        epochs.append(mine.epoch)
    assert epochs == sorted(set(epochs))


@looped
async def test_zero_retention_begins_with_a_purge(tmp_path: Path) -> None:
    world = World(tmp_path)
    ann = await world.account("ann")
    before = await world.scope(ann)
    await world.settings(ann, Settings(cache_keep_s=9.0))
    assert await world.scope(ann) == before
    await world.settings(ann, Settings(zero_retention=True))
    assert (await world.scope(ann)).epoch == before.epoch + 1
    await world.settings(ann, Settings(zero_retention=True, cache_keep_s=9.0))
    assert (await world.scope(ann)).epoch == before.epoch + 1


@looped
async def test_a_plan_and_settings_say_how_an_account_is_treated(tmp_path: Path) -> None:
    world = World(tmp_path)
    plan = Plan("team", Limits(), weight=3.0, sequences=4, kv_blocks=50, floor_blocks=5, cap_blocks=9, wait_s=2.5)
    await world.accounts.put_plan(plan)
    ann = await world.account("ann", Settings(cache_keep_s=60.0))
    await world.accounts.update(ann, lambda account: structs.replace(account, plan=plan))
    terms = terms_of(await world.caller(ann), zero_retention=False)
    assert (terms.weight, terms.sequences, terms.blocks, terms.floor_blocks, terms.cap_blocks) == (3.0, 4, 50, 5, 9)
    assert (terms.keep_s, terms.erase) == (60.0, False)


@pytest.mark.parametrize(("keep_s", "kept"), [(None, 300.0), (60.0, 60.0), (9_000.0, 300.0)])
@looped
async def test_zero_retention_keeps_a_prefix_for_minutes_and_erases_it(
    tmp_path: Path, keep_s: float | None, kept: float
) -> None:
    world = World(tmp_path)
    ann = await world.account("ann", Settings(zero_retention=True, cache_keep_s=keep_s))
    terms = terms_of(await world.caller(ann), zero_retention=True)
    assert (terms.keep_s, terms.erase) == (kept, True)
    assert (await world.scope(ann, zero=True)).kind is ScopeKind.TENANT


async def submitted(gateway: Served, **headers: str) -> Submit:
    answer = await gateway.call(gateway.run_path, TEN, **headers)
    assert answer.status == 200, answer.content
    return gateway.fleet.submits[-1]


@looped
async def test_one_request_can_ask_for_zero_retention(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        plain = await submitted(gateway)
        assert (plain.scope.kind, plain.terms.erase) == (ScopeKind.TENANT, False)
        for said in ("true", "True"):
            zero = await submitted(gateway, cf_aig_zdr=said)
            assert (zero.scope.kind, zero.scope.id, zero.terms.erase) == (ScopeKind.REQUEST, b"", True)
        again = await submitted(gateway, cf_aig_zdr="false")
        assert (again.scope, again.terms) == (plain.scope, plain.terms)
        refused = await gateway.call(gateway.run_path, TEN, cf_aig_zdr="maybe")
        assert (refused.status, "cf-aig-zdr" in refused.message) == (400, True)


@looped
async def test_a_header_cannot_lift_the_accounts_own_zero_retention(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        settings = Settings(zero_retention=True)
        await gateway.accounts.update(gateway.account_id, lambda one: structs.replace(one, settings=settings))
        gateway.see_changes()
        zero = await submitted(gateway, cf_aig_zdr="false")
        assert (zero.terms.erase, zero.terms.keep_s) == (True, 300.0)


@looped
async def test_calls_are_served_in_allowed_regions_alone(tmp_path: Path) -> None:
    async with served(tmp_path, region="eu-west") as gateway:
        for regions, status in ((("eu-west", "us"), 200), (("us",), 403), ((), 200)):
            settings = Settings(regions=regions)
            await gateway.accounts.update(
                gateway.account_id, lambda one, to=settings: structs.replace(one, settings=to)
            )
            gateway.see_changes()
            answer = await gateway.run(**TEN)
            assert answer.status == status
        await gateway.settled()
        assert len(await gateway.records()) == 2, "what is not served costs nothing"


@looped
async def test_what_fails_inside_is_told_without_the_words_it_failed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: object, words: str) -> list[int]:
        raise KeyError(words)

    monkeypatch.setattr(ModelTokenizer, "encode_prompt", fail)
    async with served(tmp_path) as gateway:
        answer = await gateway.run(prompt="a secret", raw=True)
    assert answer.status == 500
    assert "secret" not in answer.message
    (record,) = [record for record in caplog.records if record.getMessage() == "request_failed"]
    line = EventFormatter().format(record)
    assert "KeyError" in line
    assert "test_cache_scope.py" in line
    assert "secret" not in line
