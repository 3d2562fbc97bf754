"""Claimed keys in the SQLite store."""

from tenants.store.sqlite.file import SqliteFile


class SqliteClaimStore:
    """See ClaimStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._run = file.run

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        now_s = int(self._file.clock())
        with self._file.transaction():
            select = "SELECT value FROM claims WHERE account_id = ? AND key = ? AND until_s > ?"
            row = self._run(select, (account_id, key, now_s)).fetchone()
            if row is None:
                self._run("REPLACE INTO claims VALUES (?, ?, ?, ?)", (account_id, key, value, now_s + lifetime_s))
        return bytes(row[0]) if row else None

    async def replace(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        with self._file.transaction():
            self._run("DELETE FROM claims WHERE account_id = ? AND key = ?", (account_id, key))
            if value is not None:
                until_s = int(self._file.clock()) + lifetime_s
                self._run("INSERT INTO claims VALUES (?, ?, ?, ?)", (account_id, key, value, until_s))
