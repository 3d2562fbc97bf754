"""A store that an earlier version filled is read as it is and goes on: open requests settle, and batches end."""

import gzip
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from msgspec import structs

from gateway.batch.encryption import BatchEncryption, StoredRequest
from gateway.http.idempotency import IdempotencyStore
from tenants.audit import AuditLog
from tenants.auth.accounts import AccountService
from tenants.auth.errors import AccountSuspended, AmbiguousName, NameInUse, UnknownToken
from tenants.open import open_store
from tenants.records.accounts import Notice, Notices, Plan, Settings
from tenants.records.batches import BatchItemResult, BatchStatus
from tenants.records.grants import Grant, Permission
from tenants.records.limits import Limits
from tenants.records.usage import MICRO, Totals, UsageRecord, UsageRow
from tenants.store.protocol import Store
from tests.compatibility.conftest import FILES

pytestmark = pytest.mark.anyio
DAY = 40_000
MODEL = "@cf/a/b"
TEAM = Plan(
    "team",
    limits=Limits(requests_per_minute=600, burst=50, classes={"large": Limits(concurrent_requests=3)}),
    weight=2.5,
    sequences=8,
    kv_blocks=100,
    floor_blocks=1,
    cap_blocks=90,
    wait_s=30.0,
    revision=1,
)


ROB = "e" * 32  # a second account of bob's name, as an earlier version let it be


@pytest.fixture
def rob() -> bool:
    """Whether there is one."""
    return False


@pytest.fixture(params=["sqlite", "redis"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, facts: dict[str, Any], rob: bool
) -> AsyncIterator[Store]:
    if request.param == "sqlite":
        path = tmp_path / "hearth.db"
        path.write_bytes(gzip.decompress((FILES / "store.sqlite.gz").read_bytes()))
        url = f"sqlite:{path}"
        if rob:
            with closing(sqlite3.connect(path, isolation_level=None)) as file:
                _, *columns = file.execute("SELECT * FROM accounts WHERE id = ?", (facts["bob"],)).fetchone()
                file.execute(f"INSERT INTO accounts VALUES (?{', ?' * len(columns)})", (ROB, *columns))
    else:
        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
            for command in json.loads((FILES / "store.redis.json").read_text()):
                client.execute_command(*(part.encode("latin-1") for part in command))
            if rob:
                client.sadd("hearth:accounts", ROB)
                client.copy(f"hearth:{{{facts['bob']}}}", f"hearth:{{{ROB}}}")
    opened = open_store(url, lambda: facts["now_s"])
    await opened.ping()
    yield opened
    await opened.close()


@pytest.fixture
def service(store: Store, facts: dict[str, Any]) -> AccountService:
    return AccountService(store, facts["secret"].encode(), lambda: facts["now_s"])


async def test_accounts_and_plans_are_read(service: AccountService, facts: dict[str, Any]) -> None:
    ann, bob = await service.get(facts["ann"]), await service.get(facts["bob"])
    assert ann.name == 'Änn "A"'
    assert ann.ceiling == Limits(neurons_per_day=5.5, concurrent_requests=7)
    assert ann.own == Limits(requests_per_minute=300)
    assert (ann.plan, ann.epoch, ann.revision, ann.suspended_at) == (TEAM, 1, 3, None)
    assert ann.settings == Settings(
        cache_scope="user",
        cache_keep_s=60.0,
        sharing=(ann.id, bob.id),
        regions=("eu-1",),
        notices=Notices("https://ann.example/hook", (0.5, 1.0)),
    )
    assert (bob.name, bob.plan.name, bob.suspended_at) == ("bob", "default", int(facts["now_s"]))


async def test_accounts_are_found_by_the_names_that_they_had(service: AccountService, facts: dict[str, Any]) -> None:
    assert (await service.find('änn "a"')).id == facts["ann"]
    assert (await service.find("bob")).id == (await service.find(facts["bob"])).id == facts["bob"]
    with pytest.raises(NameInUse) as taken:
        await service.create("Bob")
    assert taken.value.account_id == facts["bob"]


@pytest.mark.parametrize("rob", [True])
async def test_a_name_that_two_accounts_have_is_refused_with_their_ids(
    service: AccountService, facts: dict[str, Any]
) -> None:
    with pytest.raises(AmbiguousName, match=facts["bob"]) as refused:
        await service.find("bob")
    assert ROB in str(refused.value)
    with pytest.raises(NameInUse):
        await service.create("bob")
    assert (await service.purge_cache(ROB)).name == "bob"
    await service.update(ROB, lambda account: structs.replace(account, name="rob"))
    assert (await service.find("bob")).id == facts["bob"]


async def test_tokens_open_what_they_opened(service: AccountService, facts: dict[str, Any]) -> None:
    for text in (facts["token_text"], facts["old_text"]):  # the secret before the last one opens for an hour yet
        caller = await service.verify(text)
        assert (caller.account.id, caller.token_id) == (facts["ann"], facts["token"])
        assert caller.grant == Grant((Permission.INFERENCE, Permission.USAGE_READ), ("@cf/*",), ("10.0.0.0/8",))
        assert caller.token_limits == Limits(neurons_per_month=3.0)
        assert caller.expires_at == int(facts["now_s"] + 1e6)
    with pytest.raises(UnknownToken, match="revoked"):
        await service.verify(facts["revoked_text"])
    _, text = await service.mint(facts["bob"], "new")
    with pytest.raises(AccountSuspended):
        await service.verify(text)


async def test_usage_and_counters_are_read_and_an_open_request_settles(store: Store, facts: dict[str, Any]) -> None:
    ann, token = facts["ann"], facts["token"]
    assert await store.quotas.totals(ann, DAY) == Totals(2, 87, 15, 4, 21, 50, 1)
    records = {record.request_id: record for record in await store.quotas.records(ann, DAY)}
    assert records["done-1"] == UsageRecord(
        ann, "done-1", DAY, 37, 10, 4, 15, "done", token, MODEL, int(facts["now_s"] * MICRO), 40.0, 12.5,
        f"class:large\ntoken:{token}", "x\ny", '{"k":1}',
    )  # fmt: skip
    assert (await store.quotas.usage([ann], DAY, DAY))[ann] == [
        UsageRow(DAY, token, MODEL, 1, 50, 5, 0, 6),
        UsageRow(DAY, token, MODEL, 1, 37, 10, 4, 15, "x\ny"),
    ]
    for subject in records["done-1"].subjects_counted:
        (await store.quotas.reconcile(ann, DAY, subject)).check()
    final = UsageRecord(
        ann, "open-1", DAY, 41, 10, 4, 17, "done", token, MODEL, int(facts["now_s"] * MICRO), 50.0, 12.5,
        f"class:large\ntoken:{token}", "x\ny", '{"k":1}',
    )  # fmt: skip
    await store.quotas.settle([final])
    assert await store.quotas.totals(ann, DAY) == Totals(3, 128, 25, 8, 38)
    for subject in final.subjects_counted:
        (await store.quotas.reconcile(ann, DAY, subject)).check()


async def test_the_audit_chain_holds_and_goes_on(store: Store, facts: dict[str, Any]) -> None:
    log = AuditLog(store.audit, facts["secret"].encode(), lambda: facts["now_s"])
    verdict = await log.verify(facts["ann"], facts["seal"])
    assert (verdict.entries, verdict.head, verdict.problem) == (2, facts["seal"], None)
    assert [entry.action async for entry in log.entries(facts["ann"])] == ["account.create", "token.create"]
    assert (await log.verify("")).entries == 1
    await log.write(facts["ann"], "command line", "account.change", facts["ann"])
    assert (await log.verify(facts["ann"], facts["seal"])).entries == 3


async def test_claims_and_notices_are_read(store: Store, facts: dict[str, Any]) -> None:
    assert await store.claims.claim(facts["ann"], "plain", b"other", 60) == b"\x00value"
    idempotency = IdempotencyStore(store.claims, facts["secret"].encode())
    assert await idempotency.claim(facts["ann"], "asker", "key-1", b"POST /v1/x", 60) == b'{"answer":1}'
    due = facts["now_s"] - 5
    (notice,) = await store.notices.claim(facts["now_s"], 60.0, 10)
    assert notice == Notice(
        "notice_1", facts["ann"], "https://ann.example/hook", b'{"type":"limit.used"}', due, notice.tries
    )
    await store.notices.close("notice_1")
    await store.notices.add(notice)
    assert await store.notices.claim(facts["now_s"] + 100, 60.0, 10) == []


async def test_a_batch_is_read_and_runs_to_its_end(store: Store, facts: dict[str, Any]) -> None:
    ann = facts["ann"]
    cipher = BatchEncryption(facts["secret"].encode()).cipher(ann, "batch-1")
    (batch,) = await store.batches.of_account(ann)
    assert (batch.id, batch.status, batch.items, batch.succeeded) == ("batch-1", BatchStatus.RUNNING, 3, 1)
    (result,) = await store.batches.results(ann, "batch-1", 0, 3)
    assert (result.place, result.succeeded) == (0, True)
    assert cipher.open_result(0, result.result) == b'{"success":true}'
    items = await store.batches.claim(MODEL, 60.0, 10)
    assert [item.place for item in items] == [1, 2]
    for item in items:
        opened = cipher.open_request(item.place, item.body)
        assert opened == StoredRequest(b'{"prompt":"%d"}' % item.place, f"ref-{item.place}", ("x",), '{"k":1}')
        assert await store.batches.end(item, False, b"sealed", None)
    done = await store.batches.get(ann, "batch-1")
    assert done is not None
    assert (done.status, done.succeeded, done.failed) == (BatchStatus.DONE, 1, 2)
    assert BatchItemResult(1, False, b"sealed") in await store.batches.results(ann, "batch-1", 0, 3)
