"""Usage as its ledger has it, summed by what is asked for, as JSON and as CSV."""

import csv
import io
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from gateway.admin import usage as module
from gateway.admin.usage import UsageItem, usage_csv
from tenants.records.grants import Permission
from tenants.records.usage import MICRO, UsageRecord, day_of
from tests.support.admin_api import House, served_admin
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL

pytestmark = pytest.mark.usefixtures("one_day")


def today() -> date:
    return datetime.now(UTC).date()


async def used(house: House) -> tuple[str, str]:
    """Three calls with ann's first token and one with another, one with bob's; the ids of ann's two."""
    another = await house.token(Permission.INFERENCE)
    bobs = await house.token(Permission.INFERENCE, account_id=house.bob_id)
    body = {"prompt": "hello", "max_tokens": 2}
    for text in (*[house.gateway.token] * 3, another):
        assert (await house.gateway.call(house.gateway.run_path, body, authorization=f"Bearer {text}")).status == 200
    assert (await house.gateway.call(f"/ai/run/{MODEL}", body, authorization=f"Bearer {bobs}")).status == 200
    await house.gateway.quota.flush()
    return house.gateway.token.split("_")[1], another.split("_")[1]


@looped
async def test_usage_is_what_the_ledger_says_by_day_model_and_token(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        first, another = await used(house)
        rows = (await house.ask("GET", f"{house.account}/usage")).json["result"]
        assert {(row["day"], row["model"], row["token"]): row["requests"] for row in rows} == {
            (str(today()), MODEL, first): 3, (str(today()), MODEL, another): 1,
        }  # fmt: skip
        records = await house.gateway.records()
        whole = (await house.ask("GET", f"{house.account}/usage?by=model")).json["result"]
        assert whole == [
            {
                "model": MODEL,
                "requests": len(records),
                "neurons": pytest.approx(sum(record.neurons for record in records)),
                "prompt_tokens": sum(record.prompt_tokens for record in records),
                "cached_tokens": sum(record.cached_tokens for record in records),
                "completion_tokens": sum(record.completion_tokens for record in records),
            }
        ]
        for query, count in (
            (f"token={first}", 1), ("token=nobodys", 0), (f"model={MODEL}", 2), ("model=other", 0),
            (f"from={today()}&to={today()}", 2), (f"to={today() - timedelta(1)}", 0),
            (f"from={today() + timedelta(1)}", None),
        ):  # fmt: skip
            answer = await house.ask("GET", f"{house.account}/usage?{query}")
            assert answer.status == (400 if count is None else 200), query
            assert count is None or len(answer.json["result"]) == count, query
        page = (await house.ask("GET", f"{house.account}/usage?per_page=1&page=2")).json
        assert page["result_info"] == {"count": 1, "page": 2, "per_page": 1, "total_count": 2}
        assert page["result"] == sorted(rows, key=lambda row: row["token"])[1:]


@looped
async def test_usage_is_filtered_and_summed_by_tag(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        today = day_of(int(datetime.now(UTC).timestamp() * MICRO))
        columns = (today, 10, 3, 2, 5, "done", "key", "m", 7, 1.0, None, "")
        tags = ("blue\nteam:x", "blue", "")
        await house.gateway.app._tenancy.store.quotas.settle(
            [UsageRecord(house.gateway.account_id, f"r{n}", *columns, tag) for n, tag in enumerate(tags)]
        )

        async def told(query: str) -> dict[str, int]:
            rows = (await house.ask("GET", f"{house.account}/usage?{query}")).json["result"]
            return {row.get("tag", row.get("model")): row["requests"] for row in rows}

        assert await told("by=tag") == {"": 1, "blue": 2, "team:x": 1}
        assert await told("by=tag&tag=team:x") == {"blue": 1, "team:x": 1}
        assert await told("by=model&tag=blue") == {"m": 2}
        assert await told("by=model&tag=") == {"m": 1}
        assert await told("by=model&tag=red") == {}
        asked = await house.ask("GET", f"{house.account}/usage?by=tag&format=csv")
        assert {row["tag"] for row in csv.DictReader(io.StringIO(asked.content.decode()))} == {"", "blue", "team:x"}


@looped
async def test_usage_as_csv(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        await used(house)
        reader = await house.token(Permission.USAGE_READ)
        asked = await house.ask("GET", f"{house.account}/usage?format=csv", token=reader)
        assert asked.headers["content-type"].startswith("text/csv")
        accepted = await house.ask("GET", f"{house.account}/usage", token=reader, accept="text/csv")
        assert accepted.content == asked.content
        rows = list(csv.DictReader(io.StringIO(asked.content.decode())))
        assert [row["requests"] for row in sorted(rows, key=lambda row: row["requests"])] == ["1", "3"]
        assert {row["model"] for row in rows} == {f"'{MODEL}"}


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", 'a","=1', "a\n=1"])
def test_no_text_of_a_csv_is_a_formula(text: str) -> None:
    item = UsageItem(
        day=date(2026, 1, 2),
        model=text,
        requests=1,
        neurons=-0.5,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=0,
    )
    written = usage_csv([item], ["day", "model"])
    names, (day, model, requests, neurons, *_) = csv.reader(io.StringIO(written, newline=""))
    assert names[:2] == ["day", "model"]
    assert (day, requests, neurons) == ("2026-01-02", "1", "-0.5")
    assert model.removeprefix("'") == text
    assert model[0] not in "=+-@\t\r\n"


WRONG = (
    "from=yesterday", "from=2026-01-02&to=2026-01-01", "from=2020-01-01&to=2026-01-01", "by=colour", "by=", "page=0",
    "by=day%0A", "per_page=1001", "page=one", "page=1.0", "format=xml", "from=2026-02-30", "colour=red",
)  # fmt: skip


@looped
async def test_a_wrong_filter_is_refused(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        for query in WRONG:
            assert (await house.ask("GET", f"{house.account}/usage?{query}")).status == 400, query


@looped
async def test_the_operator_sums_over_all_accounts(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await used(house)
        (row,) = (await house.operate("GET", "/usage")).json["result"]
        assert (row["day"], row["requests"]) == (str(today()), 5)
        rows = (await house.operate("GET", "/usage?by=account,model")).json["result"]
        assert {row["account"]: row["requests"] for row in rows} == {house.ann_id: 4, house.bob_id: 1}
        assert {row["account"]: row["name"] for row in rows} == {house.ann_id: "test", house.bob_id: "bob"}
        (own,) = (await house.operate("GET", f"/usage?account={house.bob_id}")).json["result"]
        assert own["requests"] == 1
        assert (await house.operate("GET", f"/usage?account={'0' * 32}")).status == 404
        written = await house.operate("GET", "/usage?by=account&format=csv")
        assert written.content.decode().count("\r\n") == 3
        assert f'"{house.bob_id}",1,' in written.content.decode()
        assert written.content.decode().endswith(('"bob"\r\n', '"test"\r\n'))


@looped
async def test_what_is_told_apart_for_one_answer_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_admin(tmp_path) as house:
        await used(house)
        monkeypatch.setattr(module, "ROWS_MAX", 1)
        assert (await house.ask("GET", f"{house.account}/usage?by=model")).status == 200
        for path in (f"{house.account}/usage?by=token&format=csv", f"{house.account}/usage?by=token"):
            assert (await house.ask("GET", path)).status == 400
        assert (await house.operate("GET", "/usage?by=day,day")).status == 200
        assert (await house.operate("GET", "/usage?by=account")).status == 400
