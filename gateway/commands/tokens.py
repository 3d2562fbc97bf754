"""`hearth tokens`: an account's credentials."""

import argparse
import time
from typing import Any

from msgspec import UNSET, structs

from gateway.commands.limits import add_limits, changed_limits, limits_text, or_none
from gateway.commands.output import (
    add_action,
    add_command,
    duration,
    print_json,
    print_table,
    read_settings,
    split,
    time_text,
)
from gateway.commands.store_access import StoreAccess, token_json, with_store_access
from tenants.auth.accounts import ApiToken, Grant, Permission
from tenants.records.limits import NO_LIMITS

_TEACHING = """\
examples:
  hearth tokens mint ACCOUNT --name ci                 a further token, shown this once
  hearth tokens mint ACCOUNT --name demo --expires 30d --requests-per-minute 10
  hearth tokens mint ACCOUNT --name batch --models '@cf/meta/*' --networks 10.0.0.0/8
  hearth tokens mint ACCOUNT --name admin --permissions account:admin,usage:read
  hearth tokens list ACCOUNT                           also revoked and expired ones; never their secrets
  hearth tokens change TOKEN_ID --expires 90d --neurons-per-day 500     what is not named stays
  hearth tokens change TOKEN_ID --networks none --neurons-per-day none
  hearth tokens roll TOKEN_ID --grace 1d               a new secret; the old one opens for a day yet
  hearth tokens revoke TOKEN_ID                        for good, on every gateway within a second

A token's limits hold beside its account's. All changes are in the audit log (`hearth audit list ACCOUNT`).
"""


def add(commands: Any) -> None:
    parser = add_command(commands, "tokens", "mint, list, change, roll and revoke an account's tokens", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar="mint | list | change | roll | revoke", required=True)
    mint = add_action(actions, "mint", "a new token")
    mint.add_argument("account", help="its id, 32 hex characters")
    mint.add_argument("--name", default="token", help="for people (default: token)")
    _add_grant(mint)
    listing = add_action(actions, "list", "an account's tokens, oldest first")
    listing.add_argument("account", help="its id, 32 hex characters")
    change = _of_token(actions, "change", "say a token's name, expiry, grant or limits anew")
    change.add_argument("--name", help="for people")
    _add_grant(change)
    roll = _of_token(actions, "roll", "a new secret for a token")
    roll.add_argument("--grace", type=duration, default=0.0, metavar="1d", help="for how long the old one opens yet")
    _of_token(actions, "revoke", "end a token for good")
    parser.set_defaults(run=run)


def _of_token(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    action = add_action(actions, name, summary)
    action.add_argument("token", help="its id: the part between the underscores")
    return action


def _add_grant(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--expires",
        type=or_none(duration),
        metavar="30d",
        help="lifetime from now: a number with m, h, d or w; or none",
    )
    action.add_argument("--permissions", metavar="A,B", help=f"of {', '.join(Permission)} (at first: inference)")
    action.add_argument("--models", metavar="A,B", help="patterns of model names, with * and ? (at first: *)")
    action.add_argument("--networks", metavar="A,B", help="where it opens, like 10.0.0.0/8 (at first: anywhere)")
    add_limits(action)


def run(options: argparse.Namespace) -> int:
    actions = {"mint": _mint, "list": _list, "change": _change, "roll": _roll, "revoke": _revoke}
    return with_store_access(read_settings(options), lambda tenantry: actions[options.action](tenantry, options))


async def _mint(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    grant, limits = _grant(Grant(), options), changed_limits(NO_LIMITS, options)
    expires_at = _expiry(None, options)
    token, secret = await tenantry.accounts.mint(options.account, options.name, expires_at, grant, limits)
    await tenantry.note(token.account_id, "token.create", token.id, **_said(token))
    return _show_secret(token, secret, options)


async def _change(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    token = await tenantry.accounts.token(options.token)
    name = token.name if options.name is None else options.name
    grant, limits = _grant(token.grant, options), changed_limits(token.limits, options)
    expires_at = _expiry(token.expires_at, options)
    if structs.replace(token, name=name, expires_at=expires_at, grant=grant, limits=limits) != token:
        token = await tenantry.accounts.change(token.id, name, expires_at, grant, limits)
        await tenantry.note(token.account_id, "token.change", token.id, **_said(token))
    _print([token], options, token_json(token))
    return 0


async def _roll(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    token, secret = await tenantry.accounts.roll(options.token, options.grace)
    await tenantry.note(token.account_id, "token.roll", token.id, grace_s=options.grace)
    return _show_secret(token, secret, options)


def _show_secret(token: ApiToken, secret: str, options: argparse.Namespace) -> int:
    if options.json:
        print_json({**token_json(token), "token": secret})
    else:
        print(f"{secret}\n\nThe token is shown this once: keep it. Its id is {token.id}.")
    return 0


async def _list(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    found = list(await tenantry.accounts.tokens(options.account))
    _print(found, options, [token_json(token) for token in found])
    return 0


async def _revoke(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    token = await tenantry.accounts.token(options.token)
    await tenantry.accounts.revoke(token.id)
    await tenantry.note(token.account_id, "token.revoke", token.id)
    if options.json:
        print_json({"token_id": options.token, "revoked": True})
    else:
        print(f"{options.token} is revoked")
    return 0


def _grant(grant: Grant, options: argparse.Namespace) -> Grant:
    """With what the options say. Raises ValueError in words."""
    said: dict[str, tuple[str, ...]] = {
        name: split(getattr(options, name))
        for name in ("permissions", "models", "networks")
        if getattr(options, name) is not None
    }
    unknown = [name for name in said.get("permissions", ()) if name not in list(Permission)]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no permission; there are {', '.join(Permission)}")
    if "permissions" in said:
        said["permissions"] = tuple(map(Permission, said["permissions"]))
    return structs.replace(grant, **said)


def _expiry(before: int | None, options: argparse.Namespace) -> int | None:
    if options.expires is None:
        return before
    return None if options.expires is UNSET else int(time.time() + options.expires)


def _said(token: ApiToken) -> dict[str, Any]:
    """For the audit log."""
    return {"name": token.name, "expires_at": token.expires_at, "grant": token.grant, "limits": token.limits}


def _print(tokens: list[ApiToken], options: argparse.Namespace, document: Any) -> None:
    if options.json:
        print_json(document)
        return
    rows = [
        (
            token.id, token.name, ",".join(token.grant.permissions), ",".join(token.grant.models),
            ",".join(token.grant.networks) or "-", limits_text(token.limits),
            time_text(token.created_at), time_text(token.expires_at), time_text(token.revoked_at),
        )
        for token in tokens
    ]  # fmt: skip
    heads = ("TOKEN", "NAME", "PERMISSIONS", "MODELS", "NETWORKS", "LIMITS", "CREATED", "EXPIRES", "REVOKED")
    print_table(heads, rows)
