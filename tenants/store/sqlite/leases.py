"""Leases in the SQLite store: what other cells lent this one, and what calls have used of it."""

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from tenants.records.leases import LEASE_PREFIX, LeaseState, QuotaLease
from tenants.records.usage import MICRO
from tenants.store.protocol import LEASE_KEPT_S
from tenants.store.sqlite.file import SqliteFile

_COLUMNS: Final = ", ".join(QuotaLease.__struct_fields__)
_ADD: Final = f"INSERT INTO leases ({_COLUMNS}) VALUES ({', '.join('?' * len(QuotaLease.__struct_fields__))})"
_LEFT: Final = f"""
SELECT amount - used FROM leases WHERE account_id = ? AND id = ? AND state = {LeaseState.OPEN} AND until_us > ?
"""
_OVER: Final = f"UPDATE leases SET state = {LeaseState.CLOSED} WHERE state < {LeaseState.CLOSED} AND until_us <= ?"
_CHARGE: Final = """
UPDATE leases SET used = used + ?, open = open + ?, prompt_tokens = prompt_tokens + ?,
    cached_tokens = cached_tokens + ?, completion_tokens = completion_tokens + ? WHERE account_id = ? AND id = ?
"""


def lease_left(file: SqliteFile, account_id: str, subject: str, now_us: int) -> int:
    """The micro-neurons that a lease has left, -1 where no call may begin on it."""
    row = file.run(_LEFT, (account_id, subject.removeprefix(LEASE_PREFIX), now_us)).fetchone()
    return -1 if row is None else int(row[0])


def charge_lease(file: SqliteFile, account_id: str, subject: str, changes: Sequence[int]) -> None:
    """Adds to `used`, `open` and the three counts of tokens, inside the caller's transaction."""
    file.run(_CHARGE, (*changes, account_id, subject.removeprefix(LEASE_PREFIX)))


class SqliteLeaseStore:
    """See LeaseStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    async def begin(self, lease: QuotaLease, lifetime_us: int) -> QuotaLease:
        now_us = self._file.now_us()
        begun = structs.replace(lease, begun_us=now_us, until_us=now_us + lifetime_us)
        self._file.write(f"{_ADD} ON CONFLICT DO NOTHING", *structs.astuple(begun))
        return begun

    async def open(self, account_id: str, lease_id: str, amount: int, day: int) -> bool:
        update = "UPDATE leases SET state = ?, amount = ?, day = ? WHERE account_id = ? AND id = ? AND state = ?"
        return self._file.write(update, LeaseState.OPEN, amount, day, account_id, lease_id, LeaseState.ASKED) == 1

    async def close(self, account_id: str, lease_id: str) -> None:
        update = f"UPDATE leases SET state = {LeaseState.CLOSED} WHERE account_id = ? AND id = ? AND state < ?"
        self._file.write(update, account_id, lease_id, LeaseState.CLOSED)

    async def note_returned(self, account_id: str, lease_id: str, used: int) -> None:
        update = "UPDATE leases SET state = ?, returned = max(returned, ?), until_us = ?"
        where = f"WHERE account_id = ? AND id = ? AND state <> {LeaseState.OPEN}"
        now_us = self._file.now_us()
        with self._file.transaction():
            self._file.run(f"{update} {where}", (LeaseState.RETURNED, used, now_us, account_id, lease_id))
            over = (LeaseState.RETURNED, now_us - LEASE_KEPT_S * MICRO)
            self._file.run("DELETE FROM leases WHERE state = ? AND (until_us <= ? OR amount = 0)", over)

    async def list(self, account_id: str = "") -> Sequence[QuotaLease]:
        self._file.write(_OVER, self._file.now_us())
        select = f"SELECT {_COLUMNS} FROM leases WHERE account_id = ? OR ? = '' ORDER BY begun_us, id"
        rows = self._file.rows(select, account_id, account_id)
        return [structs.replace(QuotaLease(*row), state=LeaseState(row[5])) for row in rows]
