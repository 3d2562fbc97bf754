"""The audit log by pages and filters, whether its chain is whole, and that nothing is acknowledged without an entry."""

import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.admin import audit as module
from gateway.admin.table import OPERATIONS
from tenants.deletion import delete, restore
from tenants.records.accounts import AuditEntry, Plan
from tenants.store.protocol import StoreUnavailable
from tests.support.admin_api import OPERATOR, House, body_of, filled, served_admin
from tests.support.served_gateway import looped


async def named(house: House, count: int) -> None:
    for number in range(count):
        answer = await house.ask("PATCH", house.account, {"name": f"n{number}"})
        assert answer.status == 200


@looped
async def test_pages_by_cursor_have_every_entry_once_the_newest_first(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await named(house, 7)
        found, cursor = [], None
        while True:
            query = f"?per_page=3{'' if cursor is None else f'&cursor={cursor}'}"
            page = (await house.ask("GET", f"{house.account}/audit{query}")).json
            found += page["result"]
            cursor = page["result_info"]["cursor"]
            if cursor is None:
                break
            await named(house, 1)  # what comes meanwhile moves nothing
        assert [entry["seq"] for entry in found] == [7, 6, 5, 4, 3, 2, 1]
        assert [entry["detail"] for entry in found] == [{"name": f"n{number}"} for number in reversed(range(7))]
        whole = (await house.operate("GET", f"/accounts/{house.ann_id}/audit?per_page=100")).json["result"]
        assert [entry["seal"] for entry in whole[-7:]] == [entry["seal"] for entry in found]
        assert (await house.operate("GET", f"/accounts/{'0' * 32}/audit")).status == 404


@looped
async def test_tokens_and_accounts_are_named_and_those_of_others_to_operators_alone(
    tmp_path: Path, store_url: str
) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await named(house, 1)
        await house.operate("POST", f"/accounts/{house.ann_id}/resume")

        async def names(entries: Any) -> list[tuple[str | None, str | None]]:
            return [(entry["actor_name"], entry["target_name"]) for entry in entries.json["result"]]

        mine = await names(await house.ask("GET", f"{house.account}/audit"))
        assert mine == [(None, "n0"), ("first", "n0")], "the operator's token has no name here"
        seen = await names(await house.operate("GET", f"/accounts/{house.ann_id}/audit"))
        assert seen == [("first", "n0"), ("first", "n0")]


@looped
async def test_filters_by_action_actor_and_time(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        await named(house, 2)
        await house.operate("POST", f"/accounts/{house.ann_id}/resume")
        operator = house.operator.split("_")[1]
        now = datetime.now(UTC)
        later, earlier = (now.replace(year=now.year + n).strftime("%Y-%m-%dT%H:%M:%SZ") for n in (1, -1))
        for query, seqs in (
            ("", [3, 2, 1]), ("action=account.resume", [3]), (f"actor={operator}", [3]), ("action=nothing", []),
            (f"since={earlier}&before={later}", [3, 2, 1]), (f"since={later}", []), (f"before={earlier}", []),
            (f"action=account.settings&before={later}&per_page=1", [2]),
        ):  # fmt: skip
            page = (await house.ask("GET", f"{house.account}/audit?{query}")).json
            assert [entry["seq"] for entry in page["result"]] == seqs, query
        for query in ("since=1767225600", "since=now", "cursor=0", "per_page=101", "since=2026-01-01T00:00:00"):
            assert (await house.ask("GET", f"{house.account}/audit?{query}")).status == 400, query


@looped
async def test_a_filter_looks_at_so_many_entries_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKED_AT_MAX", 4)
    monkeypatch.setattr(module, "CHUNK", 2)
    async with served_admin(tmp_path) as house:
        await house.operate("POST", f"/accounts/{house.ann_id}/resume")
        await named(house, 6)
        path = f"{house.account}/audit?action=account.resume"
        first = (await house.ask("GET", path)).json
        assert (first["result"], first["result_info"]["cursor"]) == ([], 4)
        rest = (await house.ask("GET", f"{path}&cursor=4")).json
        assert ([entry["seq"] for entry in rest["result"]], rest["result_info"]["cursor"]) == ([1], None)


@looped
async def test_a_chain_that_was_altered_is_told(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        await named(house, 3)
        whole = (await house.operate("GET", f"/audit/verify?account={house.ann_id}")).json["result"]
        assert (whole["intact"], whole["entries"]) == (True, 3)
        cut = await house.operate("GET", f"/audit/verify?account={house.ann_id}&head={'0' * 64}")
        assert cut.json["result"]["intact"] is False
        with sqlite3.connect(tmp_path / "hearth.db") as file:
            file.execute("UPDATE audit SET target = 'bob' WHERE seq = 2")
        altered = (await house.operate("GET", f"/audit/verify?account={house.ann_id}")).json["result"]
        assert (altered["intact"], altered["entries"], altered["seq"]) == (False, 1, 2)
        assert altered["problem"]
        assert (await house.operate("GET", f"/audit/verify?account={'0' * 32}")).status == 404


class Change(NamedTuple):
    """An operation that changes something, asked for bob by whoever may."""

    method: str
    path: str
    where: str
    body: Any
    token: str


async def changes(house: House) -> list[Change]:
    """All of them, each with a token and a plan of its own to be spent."""
    found = []
    await house.gateway.accounts.put_plan(Plan("spare"))
    for method, path, operation in house.document.operations:
        if method == "GET" or "/ai/" in path or path.startswith("/v1/"):
            continue
        spare, _ = await house.gateway.accounts.mint(house.bob_id, "spare")
        token = house.operator if path.startswith(OPERATOR) else house.bob
        found.append(Change(method, path, filled(path, house.bob_id, spare.id), body_of(operation), token))
    assert len(found) == sum(operation.method != "GET" for operation in OPERATIONS)
    return found


async def prepare(house: House, change: Change) -> None:
    """Bob's account is in service, or is to be removed for the change that takes that back; no entry says so."""
    accounts, now_s = house.gateway.accounts, house.gateway.app._tenancy.clock()
    if (await accounts.get(house.bob_id)).deletion is not None:
        await restore(accounts, house.bob_id, now_s)
    await accounts.resume(house.bob_id)
    if change.path.endswith("/restore"):
        await delete(accounts, house.bob_id, now_s)


@looped
async def test_no_effect_is_acknowledged_that_the_audit_log_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(entry: AuditEntry) -> bool:
        raise StoreUnavailable("the disk is full")

    async with served_admin(tmp_path) as house:
        asked = await changes(house)
        monkeypatch.setattr(house.gateway.app._tenancy.store.audit, "append", away)
        for change in asked:
            await prepare(house, change)
            answer = await house.ask(change.method, change.where, change.body, change.token)
            assert answer.status == 503, (change.path, answer.content)


@looped
async def test_every_change_has_one_entry_of_its_actor(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        for change in await changes(house):
            await prepare(house, change)
            before = await entries(house)
            answer = await house.ask(change.method, change.where, change.body, change.token)
            assert answer.status == 200, (change.path, answer.content)
            (new,) = [one for one in await entries(house) if one not in before]
            assert new[0] == change.token.split("_")[1], change.path


async def entries(house: House) -> list[tuple[str, str, str, int]]:
    found = []
    for chain in ["", *[account.id for account in await house.gateway.accounts.list()]]:
        found += [(*entry, number) for number, entry in enumerate(await house.audited(chain))]
    return found


@looped
async def test_a_store_that_is_away_is_told_and_nothing_is_changed(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        accounts = house.gateway.accounts
        connection = house.gateway.app._tenancy.store._file.connection  # type: ignore[attr-defined]  # SQLite's
        for change in await changes(house):
            await prepare(house, change)
            before = await accounts.get(house.bob_id), await accounts.tokens(house.bob_id)
            connection.execute("PRAGMA query_only = 1")
            answer = await house.ask(change.method, change.where, change.body, change.token)
            connection.execute("PRAGMA query_only = 0")
            assert (answer.status, answer.headers.get("retry-after")) == (503, "1"), (change.path, answer.content)
            after = await accounts.get(house.bob_id), await accounts.tokens(house.bob_id)
            assert after == before, change.path
