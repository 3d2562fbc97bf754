"""Opens the store for the operator's commands, whether a server runs or not: both see the same one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.commands.words import fail
from gateway.config import Config
from gateway.state import server_secret
from tenants.accounts import Account, Accounts, ApiToken, NotFound
from tenants.store import StoreUnavailable, open_store


def ask(config: Config, question: Callable[[Accounts], Awaitable[int]]) -> int:
    """Runs `question` with the accounts of this store; says on stderr what the tenants' side refuses."""

    secret = server_secret(config)

    async def asked() -> int:
        store = open_store(config.store_url)
        try:
            return await question(Accounts(store, secret))
        finally:
            await store.close()

    try:
        return asyncio.run(asked())
    except NotFound as error:
        return fail(str(error.args[0]))
    except (StoreUnavailable, ValueError) as error:
        return fail(str(error))


def account_json(account: Account) -> dict[str, Any]:
    return {
        "account_id": account.id,
        "name": account.name,
        "created_at": account.created_at,
        "limits": {
            "requests_per_minute": account.limits.requests_per_minute,
            "neurons_per_day": account.limits.neurons_per_day,
            "concurrent_requests": account.limits.concurrent_requests,
            "burst": account.limits.at_once,
        },
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
    }
