"""Batches in the SQLite store. It shares the store's connection and its transactions, and knows no more of it.

An account's line for a model is one row of batch_lines: when its next turn is. Items wait in the order of their rows.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

from msgspec import structs

from tenants.records.batches import (
    LISTED_MAX,
    OPEN_BATCHES_MAX,
    OPEN_ITEMS_MAX,
    WAITING_S,
    BatchItemResult,
    BatchJob,
    BatchJobItem,
    BatchStatus,
    QueueDepth,
)
from tenants.records.usage import UsageRecord
from tenants.store.protocol import Clock


class _State(enum.IntEnum):
    """Of an item."""

    WAITING = 0
    LEASED = 1
    SUCCEEDED = 2
    FAILED = 3


_BATCH: Final = ", ".join(BatchJob.__struct_fields__)
_OPEN: Final = "status IN ('queued', 'running')"
_LEFT: Final = "items - succeeded - failed"
_LAPSED: Final = f"""
UPDATE batch_items SET state = {_State.WAITING} WHERE state = {_State.LEASED} AND until <= ? RETURNING model, account_id
"""
_CLAIM: Final = f"""
UPDATE batch_items SET state = {_State.LEASED}, until = ?, tries = tries + 1 WHERE number IN (
    SELECT number FROM batch_items WHERE model = ? AND account_id = ? AND state = {_State.WAITING}
    ORDER BY number LIMIT ?
) RETURNING number, batch_id, place, body, tries, (SELECT token_id FROM batches WHERE id = batch_id)
"""
_RENEW: Final = f"UPDATE batch_items SET until = ? WHERE batch_id = ? AND place = ? AND state = {_State.LEASED}"
_PUT_BACK: Final = f"""
UPDATE batch_items SET state = {_State.WAITING}, tries = tries - 1
    WHERE batch_id = ? AND place = ? AND state = {_State.LEASED}
"""
_END_ITEM: Final = f"""
UPDATE batch_items SET state = ?, result = ?, body = x''
    WHERE batch_id = ? AND place = ? AND state IN ({_State.WAITING}, {_State.LEASED})
"""
_COUNT: Final = f"""
UPDATE batches SET succeeded = succeeded + ?, failed = failed + ?, prompt_tokens = prompt_tokens + ?,
    completion_tokens = completion_tokens + ? WHERE id = ? RETURNING {_LEFT}
"""
_CLOSE: Final = f"""
UPDATE batches SET status = ?, ended_at = ?, expires_at = ? + keep_s WHERE id = ? AND account_id = ? AND {_OPEN}
"""
_STOP_ITEMS: Final = f"DELETE FROM batch_items WHERE batch_id = ? AND state IN ({_State.WAITING}, {_State.LEASED})"
_WAITING: Final = f"SELECT model, sum({_LEFT}), min(created_at) FROM batches WHERE {_OPEN} GROUP BY model"


class SqliteCalls(NamedTuple):
    """What a store lends: statements, reads, a transaction around several; how a request is settled inside one."""

    run: Callable[..., Any]
    rows: Callable[..., list[Any]]
    transaction: Callable[[], AbstractContextManager[None]]
    settle: Callable[[UsageRecord], None]
    clock: Clock


class SqliteBatchStore:
    """See Batches."""

    def __init__(self, file: SqliteCalls) -> None:
        self._run = file.run
        self._read = file.rows
        self._transaction = file.transaction
        self._settle = file.settle
        self._clock = file.clock

    async def begin(self, batch: BatchJob) -> bool:
        open_ones = "SELECT count(*), coalesce(sum(items), 0) FROM batches WHERE account_id = ? AND ended_at IS NULL"
        insert = f"INSERT INTO batches ({_BATCH}) VALUES ({', '.join('?' * len(structs.astuple(batch)))})"
        with self._transaction():
            if self._run("SELECT 1 FROM batches WHERE id = ?", (batch.id,)).fetchone():
                return True
            count, items = self._run(open_ones, (batch.account_id,)).fetchone()
            if count >= OPEN_BATCHES_MAX or items + batch.items > OPEN_ITEMS_MAX:
                return False
            self._run(insert, structs.astuple(structs.replace(batch, status=BatchStatus.ARRIVING)))
        return True

    async def add_items(self, account_id: str, batch_id: str, first: int, bodies: Sequence[bytes]) -> None:
        columns = "batch_id, place, account_id, model, body, state, until, tries"
        insert = f"""INSERT INTO batch_items ({columns}) SELECT id, ?, account_id, model, ?, {_State.WAITING}, 0, 0
            FROM batches WHERE id = ? AND account_id = ? ON CONFLICT DO NOTHING"""
        with self._transaction():
            for place, body in enumerate(bodies, first):
                self._run(insert, (place, body, batch_id, account_id))

    async def open(self, account_id: str, batch_id: str) -> None:
        arrived = f"""UPDATE batches SET status = 'queued', expires_at = created_at + {WAITING_S}
            WHERE id = ? AND account_id = ? AND status = 'arriving' RETURNING model"""
        with self._transaction():
            for (model,) in self._run(arrived, (batch_id, account_id)).fetchall():
                self._line_up(model, account_id)

    def _line_up(self, model: str, account_id: str) -> None:
        self._run("INSERT INTO batch_lines VALUES (?, ?, 0) ON CONFLICT DO NOTHING", (model, account_id))

    async def get(self, account_id: str, batch_id: str) -> BatchJob | None:
        rows = self._read(f"SELECT {_BATCH} FROM batches WHERE id = ? AND account_id = ?", batch_id, account_id)
        return next(iter(_batches(rows)), None)

    async def of_account(self, account_id: str) -> Sequence[BatchJob]:
        select = f"SELECT {_BATCH} FROM batches WHERE account_id = ? ORDER BY created_at DESC, id LIMIT {LISTED_MAX}"
        return _batches(self._read(select, account_id))

    async def results(self, account_id: str, batch_id: str, first: int, most: int) -> Sequence[BatchItemResult]:
        select = f"""SELECT place, state = {_State.SUCCEEDED}, result FROM batch_items
            WHERE batch_id = ? AND account_id = ? AND place BETWEEN ? AND ? AND result IS NOT NULL ORDER BY place"""
        rows = self._read(select, batch_id, account_id, first, first + most - 1)
        return [BatchItemResult(place, bool(succeeded), result) for place, succeeded, result in rows]

    async def claim(self, model: str, lease_s: float, most: int) -> Sequence[BatchJobItem]:
        now, claimed = self._clock(), list[Any]()
        with self._transaction():
            for of_model, account_id in set(self._run(_LAPSED, (now,)).fetchall()):
                self._line_up(of_model, account_id)
            while not claimed:
                first = "SELECT account_id FROM batch_lines WHERE model = ? AND turn <= ? ORDER BY turn LIMIT 1"
                found = self._run(first, (model, now)).fetchone()
                if found is None:
                    return []
                claimed = sorted(self._run(_CLAIM, (now + lease_s, model, *found, most)).fetchall())
                if claimed:
                    again = "UPDATE batch_lines SET turn = ? WHERE model = ? AND account_id = ?"
                    self._run(again, (now, model, *found))
                else:
                    self._run("DELETE FROM batch_lines WHERE model = ? AND account_id = ?", (model, *found))
            for batch_id in {row[1] for row in claimed}:
                self._run("UPDATE batches SET status = 'running' WHERE id = ? AND status = 'queued'", (batch_id,))
        (account_id,) = found
        return [BatchJobItem(account_id, id, place, token, model, *rest) for _, id, place, *rest, token in claimed]

    async def renew(self, items: Sequence[BatchJobItem], lease_s: float) -> Sequence[BatchJobItem]:
        until = self._clock() + lease_s
        with self._transaction():
            return [item for item in items if not self._run(_RENEW, (until, item.batch_id, item.place)).rowcount]

    async def put_back(self, items: Sequence[BatchJobItem], delay_s: float) -> None:
        turn = self._clock() + delay_s
        with self._transaction():
            for item in items:
                self._run(_PUT_BACK, (item.batch_id, item.place))
                self._run("REPLACE INTO batch_lines VALUES (?, ?, ?)", (item.model, item.account_id, turn))

    async def end(self, item: BatchJobItem, succeeded: bool, result: bytes, record: UsageRecord | None) -> bool:
        state = _State.SUCCEEDED if succeeded else _State.FAILED
        tokens = (0, 0) if record is None else (record.prompt_tokens, record.completion_tokens)
        with self._transaction():
            if record is not None:
                self._settle(record)
            if not self._run(_END_ITEM, (state, result, item.batch_id, item.place)).rowcount:
                return False
            (left,) = self._run(_COUNT, (succeeded, not succeeded, *tokens, item.batch_id)).fetchone()
            if not left:
                self._close(item.account_id, item.batch_id, BatchStatus.DONE)
        return True

    async def close(self, account_id: str, batch_id: str, status: BatchStatus) -> bool:
        with self._transaction():
            return self._close(account_id, batch_id, status)

    def _close(self, account_id: str, batch_id: str, status: BatchStatus) -> bool:
        now = int(self._clock())
        if not self._run(_CLOSE, (status, now, now, batch_id, account_id)).rowcount:
            return False
        self._run(_STOP_ITEMS, (batch_id,))
        return True

    async def drop(self, account_id: str) -> None:
        with self._transaction():
            for table in ("batches", "batch_items", "batch_lines"):
                self._run(f"DELETE FROM {table} WHERE account_id = ?", (account_id,))

    async def sweep(self) -> None:
        """One batch in each transaction: what they hold may be much."""
        for (batch_id,) in self._read("SELECT id FROM batches WHERE expires_at <= ?", int(self._clock())):
            with self._transaction():
                self._run("DELETE FROM batch_items WHERE batch_id = ?", (batch_id,))
                self._run("DELETE FROM batches WHERE id = ?", (batch_id,))

    async def waiting(self, models: Sequence[str]) -> Mapping[str, QueueDepth]:
        return {model: QueueDepth(items, at) for model, items, at in self._read(_WAITING) if model in models}


def _batches(rows: list[Any]) -> "list[BatchJob]":
    """Those that have arrived."""
    found = [BatchJob(*row) for row in rows]
    found = [structs.replace(batch, status=BatchStatus(batch.status)) for batch in found]
    return [batch for batch in found if batch.status is not BatchStatus.ARRIVING]
