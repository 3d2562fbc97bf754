"""Opens the store for the operator's commands, whether a server runs or not: both see the same one."""

import asyncio
import os
import pwd
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.commands.limits import limits_json
from gateway.commands.output import fail
from gateway.config import Config
from gateway.state_dir import server_secret
from tenants.audit import AuditLog, fit_detail
from tenants.auth.accounts import Account, AccountService, ApiToken, Conflict, NotFound
from tenants.open import open_store
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.plans import DEFAULT_PLAN, Plan
from tenants.store.protocol import Store, StoreUnavailable

ACTOR = "command line"


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The tenants' side of one store. `secret` is the server's."""

    store: Store
    secret: bytes
    accounts: AccountService
    audit: AuditLog

    async def note(self, account_id: str, action: str, target: str, **detail: Any) -> None:
        """Writes into the audit log what was just done, with the name of this process's user. Call it before you say
        that it is done. Of a detail that is too long, only its digest is kept."""
        who = {"os_user": _os_user()}
        await self.audit.write(account_id, ACTOR, action, target, **fit_detail({**who, **detail}, **who))

    async def open_account(
        self, name: str, ceiling: Limits = NO_LIMITS, plan: str = DEFAULT_PLAN.name
    ) -> tuple[Account, str]:
        """A new account, and the text of its first token."""
        account = await self.accounts.create(name, ceiling, plan)
        said = {"name": account.name, "plan": plan, "ceiling": ceiling}
        await self.note(account.id, "account.create", account.id, **said)
        token, text = await self.accounts.mint(account.id, "first")
        await self.note(account.id, "token.create", token.id, name=token.name)
        return account, text


def store_access_of(store: Store, secret: bytes) -> StoreAccess:
    return StoreAccess(store, secret, AccountService(store, secret), AuditLog(store.audit, secret))


def with_store_access(config: Config, question: Callable[[StoreAccess], Awaitable[int]]) -> int:
    """Runs `question` with the tenants' side of the configured store; says on stderr what it refuses."""
    secret = server_secret(config)

    async def asked() -> int:
        store = open_store(config.store_url)
        try:
            return await question(store_access_of(store, secret))
        finally:
            await store.close()

    try:
        return asyncio.run(asked())
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
    said: dict[str, Any] = msgspec.to_builtins(plan)
    return {**said, "limits": limits_json(plan.limits)}


def _os_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        return str(os.getuid())
