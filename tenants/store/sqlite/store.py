"""The store as one SQLite file, for one gateway. It shares the file with the processes of the command line."""

from collections.abc import Sequence

from tenants.store.protocol import Clock
from tenants.store.sqlite.accounts import SqliteAccountStore
from tenants.store.sqlite.audit import SqliteAuditStore
from tenants.store.sqlite.batches import SqliteBatchStore
from tenants.store.sqlite.claims import SqliteClaimStore
from tenants.store.sqlite.file import SqliteFile
from tenants.store.sqlite.notices import SqliteNoticeStore
from tenants.store.sqlite.quotas import SqliteQuotaStore
from tenants.store.sqlite.schema import SCHEMA_VERSION


class SqliteStore:
    """See Store. Raises StoreUnavailable where the file cannot be opened."""

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._file = SqliteFile(path, clock)
        self.accounts = SqliteAccountStore(self._file)
        self.quotas = SqliteQuotaStore(self._file)
        self.batches = SqliteBatchStore(self._file, self.quotas)
        self.audit = SqliteAuditStore(self._file)
        self.claims = SqliteClaimStore(self._file)
        self.notices = SqliteNoticeStore(self._file)

    async def ping(self) -> None:
        """Writes a page, for which a full disk has no room."""
        with self._file.transaction():
            self._file.run(f"PRAGMA user_version = {SCHEMA_VERSION}")

    async def advice(self) -> Sequence[str]:
        return []

    async def close(self) -> None:
        self._file.connection.close()
