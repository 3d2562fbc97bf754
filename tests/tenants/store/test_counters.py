"""What stores keep beside quotas, on SQLite and on a real Redis: revisions, plans, claims, notices, usage."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from tenants.records.accounts import DEFAULT_PLAN, Account, Notice, Plan
from tenants.records.holds import Hold
from tenants.records.limits import Limits
from tenants.records.usage import EXPIRED, MICRO, UsageRecord, UsageRow
from tenants.store.protocol import OTHER_TAGS, TAGGED_MAX, Store

pytestmark = pytest.mark.anyio
ANN, BOB = "a" * 32, "b" * 32


async def test_of_two_changes_of_one_revision_only_one_is_kept(store: Store) -> None:
    account = Account(ANN, "ann", Limits(), 1)
    await store.accounts.add(account)
    changes = [structs.replace(account, name=f"n{n}", revision=2) for n in range(10)]
    kept = await asyncio.gather(*(store.accounts.update(change) for change in changes))
    assert kept.count(True) == 1
    assert await store.accounts.get(ANN) == changes[kept.index(True)]
    assert not await store.accounts.update(structs.replace(account, revision=4)), "a revision was left out"
    assert not await store.accounts.update(Account(BOB, "bob", Limits(), 1, revision=2)), "there is no such account"
    assert await store.accounts.get(BOB) is None


async def test_an_account_that_is_added_again_is_there_once(store: Store) -> None:
    account = Account(ANN, "ann", Limits(requests_per_minute=5), 1)
    await store.accounts.add(account)
    await store.accounts.add(account)
    assert await store.accounts.list() == [account]


async def test_accounts_have_their_plan_as_it_is_now(store: Store) -> None:
    team = Plan("team", Limits(neurons_per_day=5.0), weight=2.0, revision=1)
    assert await store.accounts.put_plan(team)
    await store.accounts.add(Account(ANN, "ann", Limits(), 1, plan=team))
    await store.accounts.add(Account(BOB, "bob", Limits(), 2))
    richer = structs.replace(team, limits=Limits(neurons_per_day=9.0), revision=2)
    assert await store.accounts.put_plan(richer)
    assert not await store.accounts.put_plan(richer), "that revision is taken"
    assert not await store.accounts.put_plan(Plan("other", revision=2)), "the first revision is 1"
    assert [account.plan for account in await store.accounts.list()] == [richer, DEFAULT_PLAN]
    assert await store.accounts.plans() == [richer]
    assert await store.accounts.remove_plan("team")
    assert not await store.accounts.remove_plan("team")
    found = await store.accounts.get(ANN)
    assert found is not None
    assert found.plan == DEFAULT_PLAN


async def test_the_default_plan_can_be_changed_for_all_that_have_no_other(store: Store) -> None:
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    poorer = structs.replace(DEFAULT_PLAN, limits=Limits(requests_per_minute=1), revision=1)
    assert await store.accounts.put_plan(poorer)
    found = await store.accounts.get(ANN)
    assert found is not None
    assert found.limits.requests_per_minute == 1


async def test_a_claim_has_one_winner_and_is_free_again_after_its_time(store: Store, clock: Any) -> None:
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    claims = await asyncio.gather(*(store.claims.claim(ANN, "k", b"%d" % n, 60) for n in range(20)))
    (winner,) = [n for n, found in enumerate(claims) if found is None]
    assert {found for found in claims if found is not None} == {b"%d" % winner}
    assert await store.claims.claim(ANN, "k2", b"x", 60) is None
    assert await store.claims.claim(BOB, "k", b"x", 60) is None
    await store.claims.replace(ANN, "k", b"answer", 60)
    assert await store.claims.claim(ANN, "k", b"x", 60) == b"answer"
    await store.claims.replace(ANN, "k", None, 60)
    assert await store.claims.claim(ANN, "k", b"new", 60) is None


async def test_notices_are_taken_when_due_and_by_one_taker_at_a_time(store: Store, clock: Any) -> None:
    now = clock()
    notices = [Notice(f"n{n}", ANN, "https://ann.example/", b"\x00body", now + n) for n in range(3)]
    for notice in notices:
        await store.notices.add(notice)
        await store.notices.add(notice)
    assert await store.notices.claim(now - 1, 30, 10) == []
    taken = await asyncio.gather(*(store.notices.claim(now + 1, 30, 10) for _ in range(5)))
    assert [one for part in taken for one in part] == notices[:2]
    (again, late) = await store.notices.claim(now + 31, 60, 2)
    assert (again.id, again.tries, late.id) == ("n2", 0, "n0")
    await store.notices.postpone("n2", now + 500)
    await store.notices.postpone("never", now)
    assert [one.id for one in await store.notices.claim(now + 200, 30, 10)] == ["n1", "n0"]
    for notice in notices:
        await store.notices.close(notice.id)
        await store.notices.add(notice)
    assert await store.notices.claim(now + 1_000, 30, 10) == [], "it was told once"


async def test_usage_is_summed_by_day_token_and_model(store: Store, clock: Any) -> None:
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    day = clock.day
    for n, (of_day, token, model) in enumerate(
        [(day, "k1", "m"), (day, "k1", "m"), (day, "k2", "m"), (day - 1, "jwt:a|b", "@cf/a/b"), (day - 5, "k1", "m")]
    ):
        record = UsageRecord(ANN, f"r{n}", of_day, 10 + n, 3, 2, 5, "done", token, model, 7, 1.0)
        await store.quotas.settle([record, record])
    expired = UsageRecord(ANN, "r9", day, 100, 1, 1, 1, "expired", "k2", "m", 7, 1.0)
    await store.quotas.settle([expired])
    await store.quotas.settle([structs.replace(expired, micro_neurons=7, outcome="done")])
    assert (await store.quotas.usage([ANN], day - 1, day))[ANN] == [
        UsageRow(day - 1, "jwt:a|b", "@cf/a/b", 1, 13, 3, 2, 5),
        UsageRow(day, "k1", "m", 2, 21, 6, 4, 10),
        UsageRow(day, "k2", "m", 2, 19, 4, 3, 6),
    ]
    assert await store.quotas.usage([BOB], day - 1, day) == {}


def tagged(request_id: str, day: int, tags: str, outcome: str = "done", metadata: str = "") -> UsageRecord:
    return UsageRecord(
        ANN, request_id, day, 10, 3, 2, 5, outcome, "key", "m", int(request_id[1:]), 1.0, None, "", tags, metadata
    )


async def test_tags_and_metadata_stay_with_a_request_from_its_hold_to_its_record(store: Store, clock: Any) -> None:
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    told = ("a\nteam:x/y@z", '{"user":"ü","n":1.5,"ok":true}')
    for request_id in ("r1", "r2"):
        await store.quotas.reserve(Hold(tagged(request_id, clock.day, told[0], EXPIRED, told[1]), 9, MICRO))
    await store.quotas.settle([tagged("r1", clock.day, told[0], "done", told[1])])
    clock.now_s += 2
    assert await store.quotas.sweep() == 1
    found = [
        (one.request_id, one.tags, one.metadata, one.outcome) for one in await store.quotas.records(ANN, clock.day)
    ]
    assert found == [("r1", *told, "done"), ("r2", *told, EXPIRED)]
    (await store.quotas.reconcile(ANN, clock.day)).check()


async def test_usage_is_told_apart_by_tags_up_to_a_limit(store: Store, clock: Any) -> None:
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    day = clock.day
    await store.quotas.settle([tagged("r1", day, "b"), tagged("r2", day, ""), tagged("r3", day, "a\nb")])
    await store.quotas.settle([tagged("r4", day, "b"), tagged("r4", day, "b")])
    assert (await store.quotas.usage([ANN], day, day))[ANN] == [
        UsageRow(day, "key", "m", 1, 10, 3, 2, 5, ""),
        UsageRow(day, "key", "m", 1, 10, 3, 2, 5, "a\nb"),
        UsageRow(day, "key", "m", 2, 20, 6, 4, 10, "b"),
    ]
    late = [tagged(f"r{n}", day - 1, f"t{n:05}", EXPIRED if n > TAGGED_MAX else "done") for n in range(TAGGED_MAX + 3)]
    for start in range(0, len(late), 500):
        await store.quotas.settle(late[start : start + 500])
    await store.quotas.settle(
        [structs.replace(one, outcome="done", micro_neurons=20) for one in late[TAGGED_MAX + 1 :]]
    )
    rows = (await store.quotas.usage([ANN], day - 1, day - 1))[ANN]
    assert [row.tags for row in rows] == [OTHER_TAGS, *(f"t{n:05}" for n in range(TAGGED_MAX))]
    assert rows[0] == UsageRow(day - 1, "key", "m", 3, 50, 9, 6, 15, OTHER_TAGS)


async def test_usage_of_many_accounts_is_summed_by_the_columns_that_are_asked_for(store: Store, clock: Any) -> None:
    day = clock.day
    for account_id in (ANN, BOB):
        await store.accounts.add(Account(account_id, account_id, Limits(), 1))
        made = [structs.replace(tagged(f"r{n}", day, f"t{n % 3}"), account_id=account_id) for n in range(6)]
        await store.quotas.settle([structs.replace(one, token_id=f"k{n % 2}") for n, one in enumerate(made)])
    usage = store.quotas.usage
    assert await usage([ANN, "c" * 32, BOB], day - 1, day, ()) == {
        account_id: [UsageRow(day, "", "", 6, 60, 18, 12, 30)] for account_id in (ANN, BOB)
    }
    by_token = [UsageRow(day, f"k{n}", "", 3, 30, 9, 6, 15) for n in range(2)]
    assert await usage([BOB], day, day, ("token_id",)) == {BOB: by_token}
    by_tags = [UsageRow(day, "", "m", 2, 20, 6, 4, 10, f"t{n}") for n in range(3)]
    assert await usage([ANN], day, day, ("tags", "model")) == {ANN: by_tags}
    assert len((await usage([ANN], day, day))[ANN]) == 6
    assert await usage([], day, day) == {}


async def test_records_of_some_requests_are_found_among_many(store: Store, clock: Any) -> None:
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    made = [tagged(f"r{n}", clock.day, "") for n in range(9)]
    await store.quotas.settle(made)
    assert list(await store.quotas.records(ANN, clock.day, ["r7", "absent", "r2"])) == [made[2], made[7]]
    assert list(await store.quotas.records(ANN, clock.day, [])) == []
    assert list(await store.quotas.records(ANN, clock.day)) == made
