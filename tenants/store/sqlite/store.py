"""The store as one SQLite file, for one gateway, with its small parts: audit log, claimed keys, notices.

It shares the file with the processes of the command line.
"""

from collections.abc import Sequence

from msgspec import structs

from tenants.records.accounts import AuditEntry, Notice
from tenants.store.protocol import (
    AccountStore,
    AuditStore,
    BatchStore,
    ClaimStore,
    Clock,
    ClusterStore,
    LeaseStore,
    NoticeStore,
    QuotaStore,
)
from tenants.store.sqlite.accounts import SqliteAccountStore
from tenants.store.sqlite.batches import SqliteBatchStore
from tenants.store.sqlite.cluster import SqliteClusterStore
from tenants.store.sqlite.file import SqliteFile
from tenants.store.sqlite.leases import SqliteLeaseStore
from tenants.store.sqlite.quotas import SqliteQuotaStore
from tenants.store.sqlite.schema import SCHEMA_VERSION


class SqliteStore:
    """See Store. Raises StoreUnavailable where the file cannot be opened."""

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._file = SqliteFile(path, clock)
        quotas = SqliteQuotaStore(self._file)
        self.accounts: AccountStore = SqliteAccountStore(self._file)
        self.quotas: QuotaStore = quotas
        self.leases: LeaseStore = SqliteLeaseStore(self._file)
        self.batches: BatchStore = SqliteBatchStore(self._file, quotas)
        self.audit: AuditStore = SqliteAuditStore(self._file)
        self.claims: ClaimStore = SqliteClaimStore(self._file)
        self.notices: NoticeStore = SqliteNoticeStore(self._file)
        self.cluster: ClusterStore = SqliteClusterStore(self._file)

    async def ping(self) -> None:
        """Writes a page, for which a full disk has no room."""
        self._file.write(f"PRAGMA user_version = {SCHEMA_VERSION}")

    async def advice(self) -> Sequence[str]:
        return []

    async def close(self) -> None:
        self._file.connection.close()


class SqliteAuditStore:
    """See AuditStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    async def append(self, entry: AuditEntry) -> bool:
        last = "SELECT coalesce(max(seq), 0) FROM audit WHERE account_id = ?"
        with self._file.transaction():
            if self._file.run(last, (entry.account_id,)).fetchone()[0] != entry.seq - 1:
                return False
            self._file.run("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)", structs.astuple(entry))
        return True

    async def entries(self, account_id: str, first_seq: int, limit: int) -> Sequence[AuditEntry]:
        select = "SELECT * FROM audit WHERE account_id = ? AND seq >= ? ORDER BY seq LIMIT ?"
        return [AuditEntry(*row) for row in self._file.rows(select, account_id, first_seq, limit)]

    async def head(self, account_id: str) -> AuditEntry | None:
        rows = self._file.rows("SELECT * FROM audit WHERE account_id = ? ORDER BY seq DESC LIMIT 1", account_id)
        return AuditEntry(*rows[0]) if rows else None


class SqliteClaimStore:
    """See ClaimStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        now_s = int(self._file.clock())
        select = "SELECT value FROM claims WHERE account_id = ? AND key = ? AND until_s > ?"
        with self._file.transaction():
            row = self._file.run(select, (account_id, key, now_s)).fetchone()
            if row is None:
                self._file.run("REPLACE INTO claims VALUES (?, ?, ?, ?)", (account_id, key, value, now_s + lifetime_s))
        return bytes(row[0]) if row else None

    async def replace(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        if value is None:
            self._file.write("DELETE FROM claims WHERE account_id = ? AND key = ?", account_id, key)
        else:
            until_s = int(self._file.clock()) + lifetime_s
            self._file.write("REPLACE INTO claims VALUES (?, ?, ?, ?)", account_id, key, value, until_s)


class SqliteNoticeStore:
    """See NoticeStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    async def add(self, notice: Notice) -> None:
        insert = "INSERT INTO notices VALUES (?, ?, ?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING"
        self._file.write(insert, *structs.astuple(notice))

    async def claim(self, now: float, lease_s: float, limit: int) -> Sequence[Notice]:
        due = "SELECT id, account_id, url, body, due_at, tries FROM notices WHERE closed_at IS NULL AND due_at <= ?"
        with self._file.transaction():
            rows = self._file.run(f"{due} ORDER BY due_at LIMIT ?", (now, limit)).fetchall()
            for row in rows:
                self._file.run("UPDATE notices SET due_at = ?, tries = tries + 1 WHERE id = ?", (now + lease_s, row[0]))
        return [Notice(*row) for row in rows]

    async def postpone(self, notice_id: str, due_at: float) -> None:
        self._file.write("UPDATE notices SET due_at = ? WHERE id = ?", due_at, notice_id)

    async def close(self, notice_id: str) -> None:
        self._file.write("UPDATE notices SET closed_at = ? WHERE id = ?", int(self._file.clock()), notice_id)
