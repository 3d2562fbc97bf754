"""`hearth tokens`: an account's credentials."""

import argparse
import re
import time
from datetime import UTC, datetime
from typing import Any

from gateway.commands.tenantry import ask, token_json
from gateway.commands.words import add_action, add_command, print_json, print_table, read_settings
from tenants.accounts import Accounts

_TEACHING = """\
examples:
  hearth tokens mint ACCOUNT --name ci                 a further token, shown this once
  hearth tokens mint ACCOUNT --name demo --expires 30d
  hearth tokens list ACCOUNT                           also revoked and expired ones; never their secrets
  hearth tokens revoke TOKEN_ID                        for good, on every gateway within a second

To replace a token without a gap: mint one, change over, revoke the old one.
"""
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add(commands: Any) -> None:
    parser = add_command(commands, "tokens", "mint, list and revoke an account's tokens", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar="mint | list | revoke", required=True)
    mint = add_action(actions, "mint", "a new token")
    mint.add_argument("account", help="its id, 32 hex characters")
    mint.add_argument("--name", default="token", help="for people (default: token)")
    mint.add_argument("--expires", type=_duration, metavar="30d", help="lifetime: a number with m, h, d or w")
    listing = add_action(actions, "list", "an account's tokens, oldest first")
    listing.add_argument("account", help="its id, 32 hex characters")
    revoke = add_action(actions, "revoke", "end a token for good")
    revoke.add_argument("token", help="its id: the part between the underscores")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    actions = {"mint": _mint, "list": _list, "revoke": _revoke}
    return ask(read_settings(options), lambda accounts: actions[options.action](accounts, options))


async def _mint(accounts: Accounts, options: argparse.Namespace) -> int:
    expires_at = None if options.expires is None else time.time() + options.expires
    token, secret = await accounts.mint(options.account, options.name, expires_at)
    if options.json:
        print_json({**token_json(token), "token": secret})
    else:
        print(f"{secret}\n\nThe token is shown this once: keep it. Its id is {token.id}.")
    return 0


async def _list(accounts: Accounts, options: argparse.Namespace) -> int:
    found = await accounts.tokens(options.account)
    if options.json:
        print_json([token_json(token) for token in found])
        return 0
    rows = [
        (token.id, token.name, _date(token.created_at), _date(token.expires_at), _date(token.revoked_at))
        for token in found
    ]
    print_table(("TOKEN", "NAME", "CREATED", "EXPIRES", "REVOKED"), rows)
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
