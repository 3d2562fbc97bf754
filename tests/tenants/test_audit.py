import asyncio
from typing import Any

import pytest
import redis
from msgspec import structs

from tenants.audit import AuditLog
from tenants.records.accounts import AuditEntry
from tenants.store.protocol import Store
from tenants.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio
SECRET = b"the server's secret, 32 bytes up"
ANN = "a" * 32


@pytest.fixture
def audit(store: Store, clock: Any) -> AuditLog:
    return AuditLog(store.audit, SECRET, clock)


async def written(audit: AuditLog, count: int = 5) -> list[AuditEntry]:
    return [await audit.write(ANN, "key", "token.create", f"t{n}", name=f"n{n}") for n in range(count)]


async def test_entries_come_back_in_their_order_and_verify(audit: AuditLog, clock: Any) -> None:
    entries = await written(audit)
    await audit.write("", "command line", "plan.change", "free")
    assert [entry async for entry in audit.entries(ANN)] == entries
    assert [entry async for entry in audit.entries(ANN, 4)] == entries[3:]
    first = entries[0]
    assert (first.seq, first.at, first.actor, first.detail) == (1, int(clock()), "key", '{"name":"n0"}')
    verdict = await audit.verify(ANN)
    assert (verdict.entries, verdict.head, verdict.problem) == (5, entries[-1].seal, None)
    assert (await audit.verify("")).entries == 1
    assert (await audit.verify("b" * 32)).entries == 0


async def test_writers_at_once_make_one_chain(audit: AuditLog, store: Store, clock: Any) -> None:
    others = [audit, AuditLog(store.audit, SECRET, clock)]
    await asyncio.gather(*(others[n % 2].write(ANN, "key", "a", str(n)) for n in range(30)))
    verdict = await audit.verify(ANN)
    assert (verdict.entries, verdict.problem) == (30, None)


def tampered(store: Store, url: str, seq: int, entry: AuditEntry | None) -> None:
    """Puts another entry in that one's place, or takes it out, behind the store's back."""
    if isinstance(store, SqliteStore):
        run = store._file.connection.execute
        run("DELETE FROM audit WHERE seq = ?", (seq,))
        if entry is None:
            run("UPDATE audit SET seq = seq - 1 WHERE seq > ?", (seq,))
        else:
            run("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)", structs.astuple(entry))
        return
    from tenants.store.redis.store import _pack

    with redis.Redis.from_url(url) as client:
        key = f"hearth:{{{ANN}}}:audit"
        if entry is None:
            client.lset(key, seq - 1, b"gone")
            client.lrem(key, 1, b"gone")
        else:
            client.lset(key, seq - 1, _pack(entry))


@pytest.mark.parametrize("field", ["at", "actor", "action", "target", "detail", "seal", "account_id", "seq"])
async def test_a_changed_entry_is_found(audit: AuditLog, store: Store, store_url: str, field: str) -> None:
    entries = await written(audit)
    other: Any = {"at": 1, "seq": 9, "account_id": ANN}.get(field, "other")
    changed = structs.replace(entries[2], **{field: other})
    if field == "account_id":
        changed = structs.replace(changed, actor="somebody")
    tampered(store, store_url, 3, changed)
    verdict = await audit.verify(ANN)
    assert verdict.problem is not None
    assert verdict.seq in (3, 4)


async def test_an_entry_that_is_gone_is_found(audit: AuditLog, store: Store, store_url: str) -> None:
    await written(audit)
    tampered(store, store_url, 2, None)
    verdict = await audit.verify(ANN)
    assert (verdict.seq, verdict.entries) == (2, 1)


async def test_an_end_that_was_cut_off_is_found_by_a_head_that_was_told(
    audit: AuditLog, store: Store, store_url: str
) -> None:
    entries = await written(audit)
    tampered(store, store_url, 5, None)
    assert (await audit.verify(ANN)).problem is None, "the chain alone cannot know"
    verdict = await audit.verify(ANN, entries[-1].seal)
    assert "cut off" in (verdict.problem or "")
    assert (await audit.verify(ANN, entries[3].seal)).problem is None


async def test_without_the_secret_no_entry_can_be_made(audit: AuditLog, store: Store, clock: Any) -> None:
    await written(audit, 2)
    await AuditLog(store.audit, b"another server's secret, 32 bytes", clock).write(ANN, "key", "token.create", "forged")
    verdict = await audit.verify(ANN)
    assert (verdict.seq, verdict.entries) == (3, 2)


async def test_too_much_detail_is_refused_and_nothing_kept(audit: AuditLog) -> None:
    with pytest.raises(ValueError, match="longer than 4096 bytes"):
        await audit.write(ANN, "key", "a", "b", text="x" * 5000)
    assert (await audit.verify(ANN)).entries == 0
