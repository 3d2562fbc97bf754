"""A search among accounts, the same in both stores."""

import pytest
from msgspec import structs

from tenants.records.account_search import AccountSearch
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan
from tenants.records.limits import NO_LIMITS
from tenants.store.protocol import Store

pytestmark = pytest.mark.anyio


async def names(store: Store, **search: object) -> tuple[list[str], int]:
    accounts, count = await store.accounts.search(AccountSearch(**search))  # type: ignore[arg-type]
    return [account.name for account in accounts], count


async def fill(store: Store) -> None:
    team = Plan("team")
    await store.accounts.put_plan(structs.replace(team, revision=1))
    for i, name in enumerate(("Zebra", "acme", "Ähren GmbH", "Acme Labs", "<script>alert(1)</script>")):
        plan = team if name.lower().startswith("acme") else DEFAULT_PLAN
        suspended_at = 5 if name == "Zebra" else None
        await store.accounts.add(Account(f"{i:032x}", name, NO_LIMITS, 100 - i, plan=plan, suspended_at=suspended_at))


async def test_accounts_are_found_by_a_part_of_the_name_in_any_case_or_by_id(store: Store) -> None:
    await fill(store)
    assert await names(store, name="ACME") == (["Acme Labs", "acme"], 2)
    assert await names(store, name="äH") == (["Ähren GmbH"], 1)
    assert await names(store, name="<script") == (["<script>alert(1)</script>"], 1)
    assert await names(store, name="%") == ([], 0)
    assert await names(store, name=f"{1:032x}") == (["acme"], 1)
    assert await names(store, name="0" * 31) == ([], 0), "a part of an id finds nothing"


async def test_accounts_are_found_by_plan_and_suspension(store: Store) -> None:
    await fill(store)
    assert await names(store, plan="team", order="name") == (["acme", "Acme Labs"], 2)
    assert await names(store, suspended=True) == (["Zebra"], 1)
    assert (await names(store, suspended=False))[1] == 4
    assert await names(store, name="acme", suspended=True) == ([], 0)
    await store.accounts.remove_plan("team")
    assert (await names(store, plan="default"))[1] == 5, "who has a plan that is gone has the default one"


async def test_a_search_is_paged_by_name_or_by_age(store: Store) -> None:
    await fill(store)
    by_name = ["<script>alert(1)</script>", "acme", "Acme Labs", "Zebra", "Ähren GmbH"]
    assert await names(store, order="name") == (by_name, 5)
    assert await names(store, order="name", first=1, limit=2) == (by_name[1:3], 5)
    assert await names(store, order="name", first=9, limit=2) == ([], 5)
    assert (await names(store))[0] == ["<script>alert(1)</script>", "Acme Labs", "Ähren GmbH", "acme", "Zebra"]


async def test_an_account_that_is_found_is_whole(store: Store) -> None:
    await fill(store)
    (found,), _ = await store.accounts.search(AccountSearch(name="labs"))
    assert found == await store.accounts.get(found.id)
    assert found.plan.name == "team"
