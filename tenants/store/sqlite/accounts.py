"""Accounts, plans and tokens in the SQLite store."""

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from tenants.records.account_search import AccountHead, AccountSearch
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan, name_key
from tenants.records.grants import Grant
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.store.codec import account_document, plan_document, read_account, read_plan
from tenants.store.protocol import NameTaken
from tenants.store.sqlite.file import SqliteFile
from tenants.store.sqlite.schema import NEVER_US

_ACCOUNT: Final = """
    accounts.id, created_at, accounts.revision, suspended_at, accounts.document, plans.document, plans.revision
    FROM accounts LEFT JOIN plans ON plans.name = accounts.plan
"""
_HEADS: Final = f"""
SELECT id, name_key, coalesce(plans.name, '{DEFAULT_PLAN.name}'),
    suspended_at IS NOT NULL, created_at
FROM accounts LEFT JOIN plans ON plans.name = accounts.plan
"""
_TOKEN: Final = "id, account_id, name, created_at, expires_at, revoked_at, permitted, limits, digest, pepper, rolled"
_ADD_TOKEN: Final = f"INSERT INTO tokens ({_TOKEN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"

_pack = msgspec.msgpack.Encoder().encode
_unpack_grant = msgspec.msgpack.Decoder(Grant).decode
_unpack_limits = msgspec.msgpack.Decoder(Limits).decode
_unpack_digests = msgspec.msgpack.Decoder(list[TokenDigest]).decode


class SqliteAccountStore:
    """See AccountStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._run = file.run

    async def add(self, account: Account, *, shared_name: bool = False) -> None:
        row = (account.id, account.created_at, account.revision, account.suspended_at, account.plan.name)
        insert = "INSERT INTO accounts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
        with self._file.transaction():
            if not shared_name:
                self._require_free(account)
            self._run(insert, (*row, account_document(account), NEVER_US, name_key(account.name), _due_at(account)))

    def _require_free(self, account: Account) -> None:
        """Raises NameTaken."""
        others = "SELECT id FROM accounts WHERE name_key = ? AND id <> ? LIMIT 1"
        if holder := self._run(others, (name_key(account.name), account.id)).fetchone():
            raise NameTaken(*holder)

    async def get(self, account_id: str) -> Account | None:
        rows = self._file.rows(f"SELECT {_ACCOUNT} WHERE id = ?", account_id)
        return _account(rows[0]) if rows else None

    async def list(self) -> Sequence[Account]:
        return [_account(row) for row in self._file.rows(f"SELECT {_ACCOUNT} ORDER BY created_at, id")]

    async def of_ids(self, ids: Sequence[str]) -> Sequence[Account]:
        rows = self._file.rows(f"SELECT {_ACCOUNT} WHERE id IN (SELECT value FROM json_each(?))", json.dumps([*ids]))
        return [_account(row) for row in rows]

    async def named(self, name: str) -> Sequence[Account]:
        select = f"SELECT {_ACCOUNT} WHERE name_key = ? ORDER BY created_at, id"
        return [_account(row) for row in self._file.rows(select, name_key(name))]

    async def search(self, search: AccountSearch) -> tuple[Sequence[Account], int]:
        ids, count = search.pick(AccountHead(*row) for row in self._file.rows(_HEADS))
        rows = self._file.rows(f"SELECT {_ACCOUNT} WHERE id IN (SELECT value FROM json_each(?))", json.dumps(ids))
        accounts = {account.id: account for account in map(_account, rows)}
        return [accounts[account_id] for account_id in ids if account_id in accounts], count

    async def update(self, account: Account) -> bool:
        columns = "revision = ?, suspended_at = ?, plan = ?, document = ?, name_key = ?, delete_at = ?"
        key, before = name_key(account.name), (account.id, account.revision - 1)
        values = (account.revision, account.suspended_at, account.plan.name, account_document(account), key)
        with self._file.transaction():
            stored = self._run("SELECT name_key FROM accounts WHERE id = ? AND revision = ?", before).fetchone()
            if stored is None:
                return False
            if stored[0] != key:
                self._require_free(account)
            self._run(f"UPDATE accounts SET {columns} WHERE id = ?", (*values, _due_at(account), account.id))
        return True

    async def due_deletions(self, now_s: int) -> Sequence[Account]:
        return [_account(row) for row in self._file.rows(f"SELECT {_ACCOUNT} WHERE delete_at <= ?", now_s)]

    async def remove(self, account_id: str) -> None:
        with self._file.transaction():
            self._run("DELETE FROM tokens WHERE account_id = ?", (account_id,))
            self._run("DELETE FROM accounts WHERE id = ?", (account_id,))

    async def plans(self) -> Sequence[Plan]:
        return [_plan(*row) for row in self._file.rows("SELECT document, revision FROM plans ORDER BY name")]

    async def put_plan(self, plan: Plan) -> bool:
        with self._file.transaction():
            row = self._run("SELECT revision FROM plans WHERE name = ?", (plan.name,)).fetchone()
            if plan.revision != (row[0] if row else 0) + 1:
                return False
            self._run("REPLACE INTO plans VALUES (?, ?, ?)", (plan.name, plan.revision, plan_document(plan)))
        return True

    async def remove_plan(self, name: str) -> bool:
        return self._file.write("DELETE FROM plans WHERE name = ?", name) == 1

    async def add_token(self, token: ApiToken, digest: TokenDigest) -> bool:
        *columns, grant, limits = structs.astuple(token)
        row = (*columns, _pack(grant), _pack(limits), digest.digest, digest.pepper, None)
        with self._file.transaction():
            if not self._run("SELECT 1 FROM accounts WHERE id = ?", (token.account_id,)).fetchone():
                return False
            self._run(_ADD_TOKEN, row)
        return True

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[TokenDigest], Account] | None:
        rows = self._file.rows(f"SELECT {_TOKEN} FROM tokens WHERE id = ?", token_id)
        if not rows:
            return None
        *_, secret_digest, pepper, rolled = rows[0]
        token = _token(rows[0])
        account = await self.get(token.account_id)
        digests = [TokenDigest(secret_digest, pepper), *(_unpack_digests(rolled) if rolled else ())]
        return (token, digests, account) if account else None

    async def update_token(self, token: ApiToken, digests: Sequence[TokenDigest]) -> bool:
        columns = "name = ?, expires_at = ?, permitted = ?, limits = ?, digest = ?, pepper = ?, rolled = ?"
        newest, *rolled = digests
        fields = (token.name, token.expires_at, _pack(token.grant), _pack(token.limits))
        values = (*fields, newest.digest, newest.pepper, _pack(rolled))
        return self._file.write(f"UPDATE tokens SET {columns} WHERE id = ?", *values, token.id) == 1

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        rows = self._file.rows(f"SELECT {_TOKEN} FROM tokens WHERE account_id = ? ORDER BY created_at, id", account_id)
        return [_token(row) for row in rows]

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        update = "UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?"
        return self._file.write(update, revoked_at, token_id) == 1


def _token(row: Any) -> ApiToken:
    *columns, grant, limits = row[:8]
    columns += [_unpack_grant(grant) if grant else Grant(), _unpack_limits(limits) if limits else NO_LIMITS]
    return ApiToken(*columns)


def _account(row: Any) -> Account:
    account_id, created_at, revision, suspended_at, document, plan, plan_revision = row
    current = DEFAULT_PLAN if plan is None else _plan(plan, plan_revision)
    return read_account(account_id, created_at, revision, suspended_at, document, current)


def _due_at(account: Account) -> int | None:
    return None if account.deletion is None else account.deletion.due_at


def _plan(document: str, revision: int) -> Plan:
    return structs.replace(read_plan(document), revision=revision)
