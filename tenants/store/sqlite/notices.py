"""Notices that wait for delivery in the SQLite store."""

from collections.abc import Sequence

from msgspec import structs

from tenants.records.notices import Notice
from tenants.store.sqlite.file import SqliteFile


class SqliteNoticeStore:
    """See NoticeStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._run = file.run

    async def add(self, notice: Notice) -> None:
        with self._file.transaction():
            insert = "INSERT INTO notices VALUES (?, ?, ?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING"
            self._run(insert, structs.astuple(notice))

    async def claim(self, now: float, lease_s: float, limit: int) -> Sequence[Notice]:
        due = "SELECT id, account_id, url, body, due_at, tries FROM notices WHERE closed_at IS NULL AND due_at <= ?"
        with self._file.transaction():
            rows = self._run(f"{due} ORDER BY due_at LIMIT ?", (now, limit)).fetchall()
            for row in rows:
                self._run("UPDATE notices SET due_at = ?, tries = tries + 1 WHERE id = ?", (now + lease_s, row[0]))
        return [Notice(*row) for row in rows]

    async def postpone(self, notice_id: str, due_at: float) -> None:
        with self._file.transaction():
            self._run("UPDATE notices SET due_at = ? WHERE id = ?", (due_at, notice_id))

    async def close(self, notice_id: str) -> None:
        with self._file.transaction():
            self._run("UPDATE notices SET closed_at = ? WHERE id = ?", (int(self._file.clock()), notice_id))
