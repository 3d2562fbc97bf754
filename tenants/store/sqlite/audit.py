"""The audit log in the SQLite store."""

from collections.abc import Sequence

from msgspec import structs

from tenants.records.audit_entry import AuditEntry
from tenants.store.sqlite.file import SqliteFile


class SqliteAuditStore:
    """See AuditStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._run = file.run

    async def append(self, entry: AuditEntry) -> bool:
        with self._file.transaction():
            last = "SELECT coalesce(max(seq), 0) FROM audit WHERE account_id = ?"
            if self._run(last, (entry.account_id,)).fetchone()[0] != entry.seq - 1:
                return False
            self._run("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)", structs.astuple(entry))
        return True

    async def entries(self, account_id: str, first_seq: int, limit: int) -> Sequence[AuditEntry]:
        select = "SELECT * FROM audit WHERE account_id = ? AND seq >= ? ORDER BY seq LIMIT ?"
        return [AuditEntry(*row) for row in self._file.rows(select, account_id, first_seq, limit)]

    async def head(self, account_id: str) -> AuditEntry | None:
        rows = self._file.rows("SELECT * FROM audit WHERE account_id = ? ORDER BY seq DESC LIMIT 1", account_id)
        return AuditEntry(*rows[0]) if rows else None
