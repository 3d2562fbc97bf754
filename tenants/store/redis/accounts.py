"""Accounts, plans and tokens in the Redis store."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import structs

from tenants.records.accounts import DEFAULT_PLAN, Account, Plan
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import MICRO
from tenants.store.codec import account_document, plan_document, read_account, read_plan
from tenants.store.redis import scripts
from tenants.store.redis.database import RedisDatabase, account_key

_PLANS: Final = "hearth:plans"
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

    async def add(self, account: Account) -> None:
        await self._database.ask("SADD", "hearth:accounts", account.id)
        suspended = () if account.suspended_at is None else ("suspended_at", account.suspended_at)
        times = ("created_at", account.created_at, *suspended)
        columns = ("revision", account.revision, "plan", account.plan.name, "document", account_document(account))
        await self._database.ask("HSET", account_key(account.id), *times, *columns)

    async def get(self, account_id: str) -> Account | None:
        commands = ("HMGET", account_key(account_id), *_ACCOUNT), ("HGETALL", _PLANS)
        columns, plans = await self._database.ask_all(*commands)
        account = _account(account_id, columns, _pairs(plans))
        if account is None:
            await self._database.require_data()
        return account

    async def list(self) -> Sequence[Account]:
        ids = await self._database.account_ids()
        columns = [("HMGET", account_key(account_id), *_ACCOUNT) for account_id in ids]
        plans, *rows = await self._database.read(("HGETALL", _PLANS), *columns)
        accounts = [_account(account_id, row, plans) for account_id, row in zip(ids, rows, strict=True)]
        return sorted(filter(None, accounts), key=lambda account: (account.created_at, account.id))

    async def update(self, account: Account) -> bool:
        suspended_at = "" if account.suspended_at is None else account.suspended_at
        change = (account.revision, suspended_at, account.plan.name, account_document(account))
        return bool(await self._database.run_script_once(scripts.UPDATE_ACCOUNT, account_key(account.id), 0, *change))

    async def plans(self) -> Sequence[Plan]:
        (plans,) = await self._database.read(("HGETALL", _PLANS))
        return sorted((read_plan(plan) for plan in plans.values()), key=lambda plan: plan.name)

    async def put_plan(self, plan: Plan) -> bool:
        change = (plan.name, plan.revision, plan_document(plan))
        return bool(await self._database.run_script_once(scripts.PUT_PLAN, _PLANS, 0, *change))

    async def remove_plan(self, name: str) -> bool:
        await self._database.ask("HDEL", f"{_PLANS}:revisions", name)
        return bool(await self._database.ask("HDEL", _PLANS, name))

    async def add_token(self, token: ApiToken, digest: TokenDigest) -> bool:
        if not await self._database.ask("EXISTS", account_key(token.account_id)):
            return False
        await self._database.ask("SETNX", f"hearth:token:{token.id}", token.account_id)
        await self._database.ask("HSETNX", account_key(token.account_id, "tokens"), token.id, _pack((token, [digest])))
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
        await self._database.ask("HSETNX", account_key(owner.decode(), "revoked"), token_id, revoked_at)
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
