"""Usage of many accounts by day in one answer, in both stores."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tenants.records.usage import MICRO, UsageRecord, day_of
from tests.support.admin_api import House, served_admin
from tests.support.served_gateway import looped

pytestmark = pytest.mark.usefixtures("one_day")


async def fill(house: House) -> int:
    """Two calls of ann's today and one ten days ago, one of bob's yesterday; returns today."""
    today = day_of(int(datetime.now(UTC).timestamp() * MICRO))
    await house.gateway.app._tenancy.store.quotas.settle(
        [
            UsageRecord(account_id, f"r{n}", day, 2 * MICRO, 30, 20, 5, "done", "key", model, 7, 1.0, None, tag)
            for n, (account_id, day, model, tag) in enumerate(
                (
                    (house.ann_id, today, "m", "blue"),
                    (house.ann_id, today, "other", ""),
                    (house.ann_id, today - 10, "m", ""),
                    (house.bob_id, today - 1, "m", ""),
                )
            )
        ]
    )
    return today


@looped
async def test_each_account_of_a_page_has_a_number_for_each_day(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await fill(house)
        answer = (await house.operate("GET", "/usage/accounts?order=name")).json
        days, accounts = answer["result"]["days"], answer["result"]["accounts"]
        today = datetime.now(UTC).date()
        assert days == [str(today - timedelta(ago)) for ago in range(29, -1, -1)]
        assert [account["name"] for account in accounts] == ["bob", "landlord", "test"]
        bob, _, ann = accounts
        assert (ann["id"], ann["plan"], ann["suspended"]) == (house.ann_id, "default", False)
        assert (ann["requests"][-1], ann["requests"][-11], sum(ann["requests"])) == (2, 1, 3)
        assert (ann["neurons"][-1], ann["prompt_tokens"][-1]) == (4.0, 60)
        assert (ann["cached_tokens"][-1], ann["completion_tokens"][-1]) == (40, 10)
        assert (bob["requests"][-2], sum(bob["requests"])) == (1, 1)
        assert all(len(account[name]) == 30 for account in accounts for name in ("requests", "neurons"))
        assert answer["result_info"] == {"count": 3, "page": 1, "per_page": 20, "total_count": 3}


@looped
async def test_it_is_searched_paged_and_narrowed_like_the_list_of_accounts(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await fill(house)
        today = datetime.now(UTC).date()

        async def told(query: str) -> list[tuple[str, int]]:
            result = (await house.operate("GET", f"/usage/accounts?{query}")).json["result"]
            return [(account["name"], sum(account["requests"])) for account in result["accounts"]]

        assert await told("name=BO") == [("bob", 1)]
        assert await told("order=name&per_page=2&page=2") == [("test", 3)]
        assert await told("name=test&model=m") == [("test", 2)]
        assert await told(f"name=test&from={today}") == [("test", 2)]
        assert await told(f"name=test&to={today - timedelta(5)}") == [("test", 1)]
        assert await told("suspended=true") == []


@looped
async def test_more_than_an_answer_may_have_is_refused(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        today = datetime.now(UTC).date()
        for query in (
            f"from={today - timedelta(92)}", "per_page=201", "per_page=0", f"from={today}&to={today - timedelta(1)}",
            "order=usage", "by=day",
        ):  # fmt: skip
            assert (await house.operate("GET", f"/usage/accounts?{query}")).status == 400, query
        assert (await house.operate("GET", f"/usage/accounts?from={today - timedelta(91)}")).status == 200
