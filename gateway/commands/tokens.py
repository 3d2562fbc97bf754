"""`hearth tokens`: an account's credentials."""

import argparse
import re
import time
from datetime import UTC, datetime
from typing import Any

from gateway.commands.tenantry import ask, token_json
from gateway.commands.words import add_action, add_command, print_json, print_table, read_settings
from tenants.accounts import Accounts, ApiToken, Grant, Permission

_TEACHING = """\
examples:
  hearth tokens mint ACCOUNT --name ci                 a further token, shown this once
  hearth tokens mint ACCOUNT --name demo --expires 30d
  hearth tokens mint ACCOUNT --name batch --models '@cf/meta/*' --networks 10.0.0.0/8
  hearth tokens mint ACCOUNT --name admin --permissions account:admin,usage:read
  hearth tokens list ACCOUNT                           also revoked and expired ones; never their secrets
  hearth tokens roll TOKEN_ID --grace 1d               a new secret; the old one opens for a day yet
  hearth tokens revoke TOKEN_ID                        for good, on every gateway within a second
"""
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add(commands: Any) -> None:
    parser = add_command(commands, "tokens", "mint, list, roll and revoke an account's tokens", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar="mint | list | roll | revoke", required=True)
    mint = add_action(actions, "mint", "a new token")
    mint.add_argument("account", help="its id, 32 hex characters")
    mint.add_argument("--name", default="token", help="for people (default: token)")
    mint.add_argument("--expires", type=_duration, metavar="30d", help="lifetime: a number with m, h, d or w")
    mint.add_argument(
        "--permissions", default=Permission.INFERENCE, metavar="A,B",
        help=f"of {', '.join(Permission)} (default: {Permission.INFERENCE})",
    )  # fmt: skip
    mint.add_argument("--models", default="*", metavar="A,B", help="patterns of model names, with * and ? (default: *)")
    mint.add_argument(
        "--networks", default="", metavar="A,B", help="where it opens, like 10.0.0.0/8 (default: anywhere)"
    )
    listing = add_action(actions, "list", "an account's tokens, oldest first")
    listing.add_argument("account", help="its id, 32 hex characters")
    roll = add_action(actions, "roll", "a new secret for a token")
    roll.add_argument("token", help="its id: the part between the underscores")
    roll.add_argument("--grace", type=_duration, default=0.0, metavar="1d", help="for how long the old one opens yet")
    revoke = add_action(actions, "revoke", "end a token for good")
    revoke.add_argument("token", help="its id: the part between the underscores")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    actions = {"mint": _mint, "list": _list, "roll": _roll, "revoke": _revoke}
    return ask(read_settings(options), lambda accounts: actions[options.action](accounts, options))


async def _mint(accounts: Accounts, options: argparse.Namespace) -> int:
    expires_at = None if options.expires is None else time.time() + options.expires
    token, secret = await accounts.mint(options.account, options.name, expires_at, _grant(options))
    return _show(token, secret, options)


async def _roll(accounts: Accounts, options: argparse.Namespace) -> int:
    token, secret = await accounts.roll(options.token, options.grace)
    return _show(token, secret, options)


def _show(token: ApiToken, secret: str, options: argparse.Namespace) -> int:
    if options.json:
        print_json({**token_json(token), "token": secret})
    else:
        print(f"{secret}\n\nThe token is shown this once: keep it. Its id is {token.id}.")
    return 0


def _grant(options: argparse.Namespace) -> Grant:
    """Raises ValueError in words."""
    wanted = _split(options.permissions)
    unknown = [name for name in wanted if name not in list(Permission)]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no permission; there are {', '.join(Permission)}")
    return Grant(tuple(map(Permission, wanted)), _split(options.models), _split(options.networks))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


async def _list(accounts: Accounts, options: argparse.Namespace) -> int:
    found = await accounts.tokens(options.account)
    if options.json:
        print_json([token_json(token) for token in found])
        return 0
    rows = [
        (
            token.id, token.name, ",".join(token.grant.permissions), ",".join(token.grant.models),
            _date(token.created_at), _date(token.expires_at), _date(token.revoked_at),
        )
        for token in found
    ]  # fmt: skip
    print_table(("TOKEN", "NAME", "PERMISSIONS", "MODELS", "CREATED", "EXPIRES", "REVOKED"), rows)
    return 0


async def _revoke(accounts: Accounts, options: argparse.Namespace) -> int:
    await accounts.revoke(options.token)
    if options.json:
        print_json({"token_id": options.token, "revoked": True})
    else:
        print(f"{options.token} is revoked")
    return 0


def _date(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no lifetime: write a number and m, h, d or w, like 30d")
    return int(match[1]) * float(_UNITS[match[2]])
