"""Accounts, plans and tokens in the Redis store."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import structs

from tenants.records.account_search import AccountSearch
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan, name_key
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import MICRO
from tenants.store.codec import account_document, plan_document, read_account, read_plan
from tenants.store.protocol import NameTaken
from tenants.store.redis import account_scripts as scripts
from tenants.store.redis.database import RedisDatabase, account_key

_PLANS: Final = "hearth:plans"
_ACCOUNTS: Final = "hearth:accounts"
_NAMED: Final = "hearth:named"
_DELETIONS: Final = "hearth:deletions"
_BY_NAME: Final = "hearth:accounts:by_name"
_BY_AGE: Final = "hearth:accounts:by_age"
_INDEXED_AT_ONCE: Final = 100
_SEARCHES_MAX: Final = 3  # of one search, while earlier versions change what it finds
# An account of the first version has columns in place of its document.
_FIRST_VERSION: Final = ("name", "requests_per_minute", "micro_neurons_per_day", "concurrent_requests", "burst")
_ACCOUNT: Final = ("created_at", "revision", "suspended_at", "plan", "document", *_FIRST_VERSION)

_pack = msgspec.msgpack.Encoder().encode
# A token that was never rolled may have its one digest without a list.
_unpack_token = msgspec.msgpack.Decoder(tuple[ApiToken, TokenDigest | list[TokenDigest]]).decode


class RedisAccountStore:
    """See AccountStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def add(self, account: Account, *, shared_name: bool = False) -> None:
        await self._write(account, "", "created_at", account.created_at, shared_name=shared_name)

    async def _write(self, account: Account, before: int | str, *fields: object, shared_name: bool = False) -> bool:
        """See scripts.WRITE_ACCOUNT. Raises NameTaken."""
        await self._index_accounts()
        due_at = "" if account.deletion is None else account.deletion.due_at
        head = (account.id, name_key(account.name), int(shared_name), due_at, before)
        suspended_at = "" if account.suspended_at is None else account.suspended_at
        plan, document = account.plan.name, account_document(account)
        columns = ("revision", account.revision, "suspended_at", suspended_at, "plan", plan, "document", document)
        key = account_key(account.id)
        answer = await self._database.run_lasting(scripts.WRITE_ACCOUNT, key, *head, *columns, *fields)
        if isinstance(answer, bytes):
            raise NameTaken(answer.decode())
        return bool(answer)

    async def _index_accounts(self) -> None:
        """Sees to it that accounts are found that an earlier version added or removed."""
        counts = await self._database.ask_all(("SCARD", _ACCOUNTS), ("SCARD", _NAMED), ("ZCARD", _BY_NAME))
        if len(set(counts)) == 1:
            return
        ids, named, lines = await self._database.read(
            ("SMEMBERS", _ACCOUNTS), ("SMEMBERS", _NAMED), ("ZRANGE", _BY_NAME, 0, -1)
        )
        there = {line.split(b"\n")[1]: line.decode() for line in lines}
        missing = sorted((ids - named) | (ids ^ there.keys()))
        await self._index([(id.decode(), there.get(id, "")) for id in missing])

    async def _index(self, accounts: Sequence[tuple[str, str]]) -> None:
        """Indexes accounts anew: their ids, and the lines that they have in the index."""
        for first in range(0, len(accounts), _INDEXED_AT_ONCE):
            some = accounts[first : first + _INDEXED_AT_ONCE]
            stored = await self._stored([id for id, _ in some])
            keys = ["" if account is None else name_key(account.name) for account in stored]
            calls = [(account_key(id), (id, key, line)) for (id, line), key in zip(some, keys, strict=True)]
            await self._database.run_script(scripts.INDEX_ACCOUNT, calls)

    async def named(self, name: str) -> Sequence[Account]:
        await self._index_accounts()
        key = name_key(name)
        (ids,) = await self._database.read(("SMEMBERS", f"hearth:name:{key}"))
        # An earlier version may have renamed one since, which the index does not know.
        return [account for account in await self._accounts(ids) if name_key(account.name) == key]

    async def _accounts(self, ids: Sequence[bytes]) -> list[Account]:
        """The accounts of these ids that exist, oldest first."""
        accounts = [await self.get(account_id.decode()) for account_id in ids]
        return sorted(filter(None, accounts), key=lambda account: (account.created_at, account.id))

    async def get(self, account_id: str) -> Account | None:
        commands = ("HMGET", account_key(account_id), *_ACCOUNT), ("HGETALL", _PLANS)
        columns, plans = await self._database.ask_all(*commands)
        account = _account(account_id, columns, _pairs(plans))
        if account is None:
            await self._database.require_data()
        return account

    async def list(self) -> Sequence[Account]:
        accounts = await self._stored(await self._database.account_ids())
        return sorted(filter(None, accounts), key=lambda account: (account.created_at, account.id))

    async def of_ids(self, ids: Sequence[str]) -> Sequence[Account]:
        return [account for account in await self._stored(ids) if account is not None]

    async def _stored(self, ids: Sequence[str]) -> Sequence[Account | None]:
        """The accounts of these ids, read some at a time; their plans last, since one may be new."""
        rows = await self._database.read_apart([("HMGET", account_key(account_id), *_ACCOUNT) for account_id in ids])
        (plans,) = await self._database.read(("HGETALL", _PLANS))
        return [_account(account_id, row, plans) for account_id, row in zip(ids, rows, strict=True)]

    async def search(self, search: AccountSearch) -> tuple[Sequence[Account], int]:
        await self._index_accounts()
        index = _BY_NAME if search.order == "name" else _BY_AGE
        suspended = "" if search.suspended is None else int(search.suspended)
        wanted = (name_key(search.name), search.plan or "", suspended, search.first, search.limit)
        for _ in range(_SEARCHES_MAX):
            count, lines = await self._database.run_script_once(scripts.SEARCH_ACCOUNTS, index, *wanted)
            by_id = dict(_id_and_line(line.decode(), search.order) for line in lines)
            stored = dict(zip(by_id, await self._stored(list(by_id)), strict=True))
            stale = [(id, line) for id, line in by_id.items() if not _is_of(line, stored[id])]
            if not stale:
                break
            await self._index(stale)  # an earlier version has changed them since
        return [account for account in stored.values() if account is not None], count

    async def update(self, account: Account) -> bool:
        return await self._write(account, account.revision - 1)

    async def due_deletions(self, now_s: int) -> Sequence[Account]:
        (ids,) = await self._database.read(("ZRANGEBYSCORE", _DELETIONS, "-inf", now_s))
        return await self._accounts(ids)

    async def remove(self, account_id: str) -> None:
        key, tokens = account_key(account_id), account_key(account_id, "tokens")
        name, line, ids = await self._database.read(("HGET", key, "name_key"), ("HGET", key, "line"), ("HKEYS", tokens))
        gone = [f"hearth:token:{token_id.decode()}" for token_id in ids]
        names = () if name is None else (("SREM", b"hearth:name:" + name, account_id),)
        removals = (*names, ("SREM", _ACCOUNTS, account_id), ("SREM", _NAMED, account_id))
        if line is not None:
            words = line.split(b"\n")
            by_age = b"\n".join((words[1], words[0], *words[2:]))
            removals = (*removals, ("ZREM", _BY_NAME, line), ("ZREM", _BY_AGE, by_age))
        gone += [tokens, account_key(account_id, "revoked"), key]
        await self._database.read(("UNLINK", *gone), ("ZREM", _DELETIONS, account_id), *removals)
        self._database.recent.forget(key)

    async def plans(self) -> Sequence[Plan]:
        (plans,) = await self._database.read(("HGETALL", _PLANS))
        return sorted((read_plan(plan) for plan in plans.values()), key=lambda plan: plan.name)

    async def put_plan(self, plan: Plan) -> bool:
        change = (plan.name, plan.revision, plan_document(plan))
        return bool(await self._database.run_lasting(scripts.PUT_PLAN, _PLANS, *change))

    async def remove_plan(self, name: str) -> bool:
        self._database.recent.forget(_PLANS)
        await self._database.ask("HDEL", f"{_PLANS}:revisions", name)
        return bool(await self._database.ask("HDEL", _PLANS, name))

    async def add_token(self, token: ApiToken, digest: TokenDigest) -> bool:
        if not await self._database.ask("EXISTS", account_key(token.account_id)):
            return False
        key, document = account_key(token.account_id), _pack((token, [digest]))
        await self._database.ask_lasting(key, "SETNX", f"hearth:token:{token.id}", token.account_id)
        await self._database.ask_lasting(key, "HSETNX", account_key(token.account_id, "tokens"), token.id, document)
        return True

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[TokenDigest], Account] | None:
        owner = await self._database.ask("GET", f"hearth:token:{token_id}")
        if owner is None:
            await self._database.require_data()
            return None
        account_id = owner.decode()
        packed, revoked_at, columns, plans = await self._database.ask_all(
            ("HGET", account_key(account_id, "tokens"), token_id),
            ("HGET", account_key(account_id, "revoked"), token_id),
            ("HMGET", account_key(account_id), *_ACCOUNT),
            ("HGETALL", _PLANS),
        )
        account = _account(account_id, columns, _pairs(plans))
        if packed is None or account is None:
            await self._database.require_data()
            return None
        token, digests = _unpack_token(packed)
        digests = [digests] if isinstance(digests, TokenDigest) else digests
        return _with_revocation(token, revoked_at), digests, account

    async def update_token(self, token: ApiToken, digests: Sequence[TokenDigest]) -> bool:
        tokens = account_key(token.account_id, "tokens")
        if not await self._database.ask("HEXISTS", tokens, token.id):
            return False
        await self._database.ask("HSET", tokens, token.id, _pack((token, digests)))
        return True

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        hashes = ("HVALS", account_key(account_id, "tokens")), ("HGETALL", account_key(account_id, "revoked"))
        packed, revoked = await self._database.read(*hashes)
        tokens = [_unpack_token(entry)[0] for entry in packed]
        tokens = [_with_revocation(token, revoked.get(token.id.encode())) for token in tokens]
        return sorted(tokens, key=lambda token: (token.created_at, token.id))

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        owner = await self._database.ask("GET", f"hearth:token:{token_id}")
        if owner is None:
            return False
        account_id = owner.decode()
        change = ("HSETNX", account_key(account_id, "revoked"), token_id, revoked_at)
        await self._database.ask_lasting(account_key(account_id), *change)
        return True


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """The fields of an answer to HGETALL that redis-py did not parse."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _account(account_id: str, columns: Sequence[bytes | None], plans: dict[bytes, bytes]) -> Account | None:
    created_at, revision, suspended_at, plan, document, *first_version = columns
    if created_at is None:
        return None
    stored_plan = plans.get(plan or b"default")
    return read_account(
        account_id,
        int(created_at),
        int(revision or 1),
        None if suspended_at is None else int(suspended_at),
        document or _first_version_document(first_version),
        DEFAULT_PLAN if stored_plan is None else read_plan(stored_plan),
    )


def _id_and_line(line: str, order: str) -> tuple[str, str]:
    """The id of a line of the index by name or by age, and the line as it is in the one by name."""
    one, other, *rest = line.split("\n")
    id, key = (other, one) if order == "name" else (one, other)
    return id, "\n".join((key, id, *rest))


def _is_of(line: str, account: Account | None) -> bool:
    """Whether a line of the index says what the account is; its plan may be one that is gone."""
    if account is None:
        return False
    key, _, plan, suspended = line.split("\n")
    same_plan = plan == account.plan.name or account.plan.name == DEFAULT_PLAN.name
    return (key, suspended == "1") == (name_key(account.name), account.suspended_at is not None) and same_plan


def _first_version_document(columns: Sequence[bytes | None]) -> bytes:
    name, per_minute, micro_neurons, concurrent, burst = columns
    ceiling = Limits(
        requests_per_minute=int(per_minute or 1),
        neurons_per_day=int(micro_neurons or 0) / MICRO,
        concurrent_requests=int(concurrent or 1),
        burst=int(burst) if burst else None,
    )
    return msgspec.json.encode({"name": (name or b"").decode(), "ceiling": ceiling})


def _with_revocation(token: ApiToken, revoked_at: bytes | None) -> ApiToken:
    return token if revoked_at is None else structs.replace(token, revoked_at=int(revoked_at))
