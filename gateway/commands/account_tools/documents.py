"""Accounts, tokens and plans as commands print them with --json."""

from typing import Any

import msgspec

from gateway.commands.terminal.limits import limits_json
from tenants.records.accounts import Account, Plan
from tenants.records.tokens import ApiToken


def account_json(account: Account) -> dict[str, Any]:
    """`limits` are those that hold; `ceiling` and `own` are what was set for this account alone. `home` is the cell
    that it is kept in, where that is another one."""
    return {
        "account_id": account.id,
        "name": account.name,
        "created_at": account.created_at,
        "suspended_at": account.suspended_at,
        "deletion": None if account.deletion is None else msgspec.to_builtins(account.deletion),
        "plan": account.plan.name,
        "limits": {**limits_json(account.limits), "burst": account.limits.at_once},
        "ceiling": limits_json(account.ceiling),
        "own": limits_json(account.own),
        "settings": msgspec.to_builtins(account.settings),
        "cache_epoch": account.epoch,
        "revision": account.revision,
        "home": account.home or None,
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
