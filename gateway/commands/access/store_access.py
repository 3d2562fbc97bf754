"""Opens the store for the operator's commands, whether a server runs or not: both see the same one."""

import asyncio
import contextlib
import os
import pwd
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from gateway.commands.terminal.limits import limits_json
from gateway.commands.terminal.options import SOURCE
from gateway.commands.terminal.output import fail
from gateway.config import Config
from gateway.state_dir import server_secret
from tenants.audit import AuditLog, fit_detail
from tenants.auth.accounts import AccountService
from tenants.auth.errors import Conflict, NotFound
from tenants.open import open_store
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.tokens import ApiToken
from tenants.store.protocol import Store, StoreUnavailable

ACTOR = "command line"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The tenants' side of one store. `secret` is the server's."""

    store: Store
    secret: bytes
    accounts: AccountService
    audit: AuditLog

    async def note(self, account_id: str, action: str, target: str, **detail: Any) -> None:
        """Writes into the audit log what was just done, with the name of this process's user. Call it before you say
        that it is done. A detail that is too long is replaced by its digest."""
        user = {"os_user": _os_user()}
        await self.audit.write(account_id, ACTOR, action, target, **fit_detail({**user, **detail}, **user))

    async def open_account(
        self, name: str, ceiling: Limits = NO_LIMITS, plan: str = DEFAULT_PLAN.name
    ) -> tuple[Account, str]:
        """A new account, and the text of its first token."""
        account = await self.accounts.create(name, ceiling, plan)
        await self.note(account.id, "account.create", account.id, name=account.name, plan=plan, ceiling=ceiling)
        token, text = await self.accounts.mint(account.id, "first")
        await self.note(account.id, "token.create", token.id, name=token.name)
        return account, text


Access = Annotated[StoreAccess, SOURCE]


@contextlib.asynccontextmanager
async def opened_store(url: str) -> AsyncIterator[Store]:
    """The store of this URL, closed at the end. Raises what opening it does."""
    store = open_store(url)
    try:
        yield store
    finally:
        await store.close()


async def ask_store(config: Config, question: Callable[[StoreAccess], Awaitable[T]]) -> T:
    """The answer of `question` to the tenants' side of the configured store. Raises what the store does."""
    secret = server_secret(config)
    async with opened_store(config.store_url) as store:
        return await question(StoreAccess(store, secret, AccountService(store, secret), AuditLog(store.audit, secret)))


def with_store_access(config: Config, question: Callable[[StoreAccess], Awaitable[int | None]]) -> int:
    """Runs `question` and returns its exit status; prints on stderr what the store refuses."""
    try:
        return asyncio.run(ask_store(config, question)) or 0
    except NotFound as error:
        return fail(str(error.args[0]))
    except (StoreUnavailable, Conflict, ValueError, OSError) as error:
        return fail(str(error))


def account_json(account: Account) -> dict[str, Any]:
    """`limits` are those that hold; `ceiling` and `own` are what was set for this account alone."""
    return {
        "account_id": account.id,
        "name": account.name,
        "created_at": account.created_at,
        "suspended_at": account.suspended_at,
        "plan": account.plan.name,
        "limits": {**limits_json(account.limits), "burst": account.limits.at_once},
        "ceiling": limits_json(account.ceiling),
        "own": limits_json(account.own),
        "settings": msgspec.to_builtins(account.settings),
        "cache_epoch": account.epoch,
        "revision": account.revision,
    }


def token_json(token: ApiToken) -> dict[str, Any]:
    return {
        "token_id": token.id,
        "account_id": token.account_id,
        "name": token.name,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
        "permissions": [permission.value for permission in token.grant.permissions],
        "models": list(token.grant.models),
        "networks": list(token.grant.networks),
        "limits": limits_json(token.limits),
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(plan)
    return {**document, "limits": limits_json(plan.limits)}


def _os_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        return str(os.getuid())
