"""Batches in the SQLite store.

An account's line for a model is one row of batch_lines: when its next turn is. Items wait in the order of their rows.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import structs

from tenants.records import batches
from tenants.records.batches import BatchItemResult, BatchJob, BatchJobItem, BatchStatus, QueueDepth
from tenants.records.usage import UsageRecord
from tenants.store.sqlite.file import SqliteFile
from tenants.store.sqlite.quotas import SqliteQuotaStore


class _ItemState(enum.IntEnum):
    WAITING = 0
    LEASED = 1
    SUCCEEDED = 2
    FAILED = 3


_BATCH: Final = ", ".join(BatchJob.__struct_fields__)
_OPEN: Final = "status IN ('queued', 'running')"
_UNENDED: Final = f"state IN ({_ItemState.WAITING}, {_ItemState.LEASED})"
_LEFT: Final = "items - succeeded - failed"
_LAPSED: Final = f"""
UPDATE batch_items SET state = {_ItemState.WAITING} WHERE state = {_ItemState.LEASED} AND until <= ?
    RETURNING model, account_id
"""
_CLAIM_BYTES: Final = 256 << 10  # after which a claim takes no other item: the loop waits 2 ms for a megabyte
_CLAIM: Final = f"""
UPDATE batch_items SET state = {_ItemState.LEASED}, until = ?, tries = tries + 1 WHERE number IN (
    SELECT number FROM (
        SELECT number, sum(bytes) OVER (ORDER BY number) - bytes AS bytes_before FROM (
            SELECT number, length(body) AS bytes FROM batch_items JOIN batch_bodies USING (number)
            WHERE model = ? AND account_id = ? AND state = {_ItemState.WAITING} ORDER BY number LIMIT ?
        )
    ) WHERE bytes_before < {_CLAIM_BYTES}
) RETURNING number, batch_id, place, (SELECT body FROM batch_bodies WHERE number = batch_items.number), tries,
    (SELECT token_id FROM batches WHERE id = batch_id)
"""
_RENEW: Final = f"UPDATE batch_items SET until = ? WHERE batch_id = ? AND place = ? AND state = {_ItemState.LEASED}"
_PUT_BACK: Final = f"""
UPDATE batch_items SET state = {_ItemState.WAITING}, tries = tries - 1
    WHERE batch_id = ? AND place = ? AND state = {_ItemState.LEASED}
"""
_END_ITEM: Final = f"""
UPDATE batch_items SET state = ?, result = ? WHERE batch_id = ? AND place = ? AND {_UNENDED} RETURNING number
"""
_COUNT: Final = f"""
UPDATE batches SET succeeded = succeeded + ?, failed = failed + ?, prompt_tokens = prompt_tokens + ?,
    completion_tokens = completion_tokens + ? WHERE id = ? RETURNING {_LEFT}
"""
_CLOSE: Final = f"""
UPDATE batches SET status = ?, ended_at = ?, expires_at = ? + keep_s WHERE id = ? AND account_id = ? AND {_OPEN}
"""
_STOP_ITEMS: Final = f"DELETE FROM batch_items WHERE batch_id = ? AND {_UNENDED}"
_WAITING: Final = f"SELECT model, sum({_LEFT}), min(created_at) FROM batches WHERE {_OPEN} GROUP BY model"


class SqliteBatchStore:
    """See BatchStore. `quotas` settles a request in the transaction that ends its item."""

    def __init__(self, file: SqliteFile, quotas: SqliteQuotaStore) -> None:
        self._file = file
        self._run = file.run
        self._settle = quotas.settle_one

    async def begin(self, batch: BatchJob) -> bool:
        open_ones = "SELECT count(*), coalesce(sum(items), 0) FROM batches WHERE account_id = ? AND ended_at IS NULL"
        insert = f"INSERT INTO batches ({_BATCH}) VALUES ({', '.join('?' * len(structs.astuple(batch)))})"
        with self._file.transaction():
            if self._run("SELECT 1 FROM batches WHERE id = ?", (batch.id,)).fetchone():
                return True
            count, items = self._run(open_ones, (batch.account_id,)).fetchone()
            if count >= batches.OPEN_BATCHES_MAX or items + batch.items > batches.OPEN_ITEMS_MAX:
                return False
            self._run(insert, structs.astuple(structs.replace(batch, status=BatchStatus.ARRIVING)))
        return True

    async def add_items(self, account_id: str, batch_id: str, first: int, bodies: Sequence[bytes]) -> None:
        columns = "batch_id, place, account_id, model, state, until, tries"
        insert = f"""INSERT INTO batch_items ({columns}) SELECT id, ?, account_id, model, {_ItemState.WAITING}, 0, 0
            FROM batches WHERE id = ? AND account_id = ? ON CONFLICT DO NOTHING RETURNING number"""
        with self._file.transaction():
            for place, body in enumerate(bodies, first):
                for (number,) in self._run(insert, (place, batch_id, account_id)).fetchall():
                    self._run("INSERT INTO batch_bodies VALUES (?, ?)", (number, body))
        await self._file.wrote(bodies)

    async def open(self, account_id: str, batch_id: str) -> None:
        arrived = f"""UPDATE batches SET status = 'queued', expires_at = created_at + {batches.WAITING_S}
            WHERE id = ? AND account_id = ? AND status = 'arriving' RETURNING model"""
        with self._file.transaction():
            for (model,) in self._run(arrived, (batch_id, account_id)).fetchall():
                self._enqueue_account(model, account_id)

    def _enqueue_account(self, model: str, account_id: str) -> None:
        self._run("INSERT INTO batch_lines VALUES (?, ?, 0) ON CONFLICT DO NOTHING", (model, account_id))

    async def get(self, account_id: str, batch_id: str) -> BatchJob | None:
        return next(iter(self._batches("id = ? AND account_id = ?", batch_id, account_id)), None)

    async def of_account(self, account_id: str) -> Sequence[BatchJob]:
        newest = f"ORDER BY created_at DESC, id LIMIT {batches.LISTED_MAX}"
        return self._batches(f"account_id = ? {newest}", account_id)

    async def results(self, account_id: str, batch_id: str, first: int, limit: int) -> Sequence[BatchItemResult]:
        select = f"""SELECT place, state = {_ItemState.SUCCEEDED}, result FROM batch_items
            WHERE batch_id = ? AND account_id = ? AND place BETWEEN ? AND ? AND result IS NOT NULL ORDER BY place"""
        rows = self._file.rows(select, batch_id, account_id, first, first + limit - 1)
        return [BatchItemResult(place, bool(succeeded), result) for place, succeeded, result in rows]

    async def claim(self, model: str, lease_s: float, limit: int) -> Sequence[BatchJobItem]:
        now, claimed = self._file.clock(), list[Any]()
        with self._file.transaction():
            for of_model, account_id in set(self._run(_LAPSED, (now,)).fetchall()):
                self._enqueue_account(of_model, account_id)
            while not claimed:
                first = "SELECT account_id FROM batch_lines WHERE model = ? AND turn <= ? ORDER BY turn LIMIT 1"
                row = self._run(first, (model, now)).fetchone()
                if row is None:
                    return []
                (account_id,) = row
                claimed = sorted(self._run(_CLAIM, (now + lease_s, model, account_id, limit)).fetchall())
                if claimed:
                    again = "UPDATE batch_lines SET turn = ? WHERE model = ? AND account_id = ?"
                    self._run(again, (now, model, account_id))
                else:
                    self._run("DELETE FROM batch_lines WHERE model = ? AND account_id = ?", (model, account_id))
            for batch_id in {row[1] for row in claimed}:
                self._run("UPDATE batches SET status = 'running' WHERE id = ? AND status = 'queued'", (batch_id,))
        return [BatchJobItem(account_id, id, place, token, model, *rest) for _, id, place, *rest, token in claimed]

    async def renew(self, items: Sequence[BatchJobItem], lease_s: float) -> Sequence[BatchJobItem]:
        until = self._file.clock() + lease_s
        with self._file.transaction():
            return [item for item in items if not self._run(_RENEW, (until, item.batch_id, item.place)).rowcount]

    async def put_back(self, items: Sequence[BatchJobItem], delay_s: float) -> None:
        turn = self._file.clock() + delay_s
        with self._file.transaction():
            for item in items:
                self._run(_PUT_BACK, (item.batch_id, item.place))
                self._run("REPLACE INTO batch_lines VALUES (?, ?, ?)", (item.model, item.account_id, turn))

    async def end(self, item: BatchJobItem, succeeded: bool, result: bytes, record: UsageRecord | None) -> bool:
        state = _ItemState.SUCCEEDED if succeeded else _ItemState.FAILED
        tokens = (0, 0) if record is None else (record.prompt_tokens, record.completion_tokens)
        with self._file.transaction():
            if record is not None:
                self._settle(record)
            ended = self._run(_END_ITEM, (state, result, item.batch_id, item.place)).fetchone()
            if ended is None:
                return False
            self._run("DELETE FROM batch_bodies WHERE number = ?", ended)
            (left,) = self._run(_COUNT, (succeeded, not succeeded, *tokens, item.batch_id)).fetchone()
            if not left:
                self._close(item.account_id, item.batch_id, BatchStatus.DONE)
        return True

    async def close(self, account_id: str, batch_id: str, status: BatchStatus) -> bool:
        with self._file.transaction():
            return self._close(account_id, batch_id, status)

    def _close(self, account_id: str, batch_id: str, status: BatchStatus) -> bool:
        now = int(self._file.clock())
        if not self._run(_CLOSE, (status, now, now, batch_id, account_id)).rowcount:
            return False
        self._run(_STOP_ITEMS, (batch_id,))
        return True

    async def discard(self, account_id: str) -> None:
        with self._file.transaction():
            for table in ("batches", "batch_items", "batch_lines"):
                self._run(f"DELETE FROM {table} WHERE account_id = ?", (account_id,))

    async def sweep(self) -> None:
        """Removes one batch in each transaction: they may be large."""
        for (batch_id,) in self._file.rows("SELECT id FROM batches WHERE expires_at <= ?", int(self._file.clock())):
            with self._file.transaction():
                self._run("DELETE FROM batch_items WHERE batch_id = ?", (batch_id,))
                self._run("DELETE FROM batches WHERE id = ?", (batch_id,))

    async def waiting(self, models: Sequence[str]) -> Mapping[str, QueueDepth]:
        return {model: QueueDepth(items, at) for model, items, at in self._file.rows(_WAITING) if model in models}

    def _batches(self, condition: str, *values: Any) -> list[BatchJob]:
        """The batches of this condition, without those that are arriving."""
        rows = self._file.rows(f"SELECT {_BATCH} FROM batches WHERE status <> 'arriving' AND {condition}", *values)
        found = [BatchJob(*row) for row in rows]
        return [structs.replace(batch, status=BatchStatus(batch.status)) for batch in found]
