"""`hearth tokens`: an account's credentials."""

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Final

from cyclopts import Parameter
from msgspec import UNSET, UnsetType, structs

from gateway.commands.access.store_access import Access
from gateway.commands.account_tools.documents import token_json
from gateway.commands.terminal.limits import NO_CHANGE, LimitOptions, limits_text
from gateway.commands.terminal.options import (
    AccountRef,
    Duration,
    Json,
    OptionalDuration,
    TokenId,
    WordList,
    command_app,
    given_fields,
)
from gateway.commands.terminal.output import print_either, print_table, time_text
from tenants.records.grants import Grant, Permission
from tenants.records.limits import NO_LIMITS
from tenants.records.tokens import ApiToken

_TEACHING: Final = """\
examples:
  hearth tokens mint acme --name ci                 a further token, shown this once
  hearth tokens mint acme --name demo --expires 30d --requests-per-minute 10
  hearth tokens mint acme --name batch --models '@cf/meta/*' --networks 10.0.0.0/8
  hearth tokens mint acme --name admin --permissions account:admin,usage:read
  hearth tokens list acme                              also revoked and expired ones; never their secrets
  hearth tokens change TOKEN_ID --expires 90d --neurons-per-day 500     what is not named stays
  hearth tokens change TOKEN_ID --networks none --neurons-per-day none
  hearth tokens roll TOKEN_ID --grace 1d               a new secret; the old one opens for a day yet
  hearth tokens revoke TOKEN_ID                        for good: refused within a second; what runs ends within five

A token's limits hold beside its account's. All changes are in the audit log (`hearth audit list acme`).
"""
_HEADS: Final = ("TOKEN", "NAME", "PERMISSIONS", "MODELS", "NETWORKS", "LIMITS", "CREATED", "EXPIRES", "REVOKED")
app = command_app("tokens", "mint, list, change, roll and revoke an account's tokens", _TEACHING)


@Parameter(name="*")
@dataclass(frozen=True)
class GrantOptions:
    """What a token opens, and until when."""

    expires: Annotated[
        OptionalDuration,
        Parameter(metavar="30d", help="lifetime from now: a number with m, h, d or w; or none"),
    ] = UNSET
    permissions: Annotated[WordList, Parameter(help=f"of {', '.join(Permission)} (at first: inference)")] = UNSET
    models: Annotated[WordList, Parameter(help="patterns of model names, with * and ? (at first: *)")] = UNSET
    networks: Annotated[WordList, Parameter(help="where it opens, like 10.0.0.0/8 (at first: anywhere)")] = UNSET

    def changed(self, grant: Grant) -> Grant:
        """`grant` with what was given. Raises ValueError in words for people."""
        changes = given_fields(self, ("permissions", "models", "networks"))
        if unknown := [name for name in changes.get("permissions", ()) if name not in list(Permission)]:
            raise ValueError(f"{unknown[0]!r} is no permission; there are {', '.join(Permission)}")
        if "permissions" in changes:
            changes["permissions"] = tuple(map(Permission, changes["permissions"]))
        return structs.replace(grant, **changes)

    def expires_at(self, before: int | None) -> int | None:
        """Raises ValueError where that is now."""
        if isinstance(self.expires, UnsetType):
            return before
        if self.expires == 0:
            raise ValueError("such a token would open nothing; `hearth tokens revoke` ends one")
        return None if self.expires is None else int(time.time() + self.expires)


_NO_GRANT: Final = GrantOptions()


@app.command
async def mint(
    account: AccountRef,
    /,
    *,
    name: Annotated[str, Parameter(help="for people (default: token)")] = "token",
    grant: GrantOptions = _NO_GRANT,
    limits: LimitOptions = NO_CHANGE,
    json: Json = False,
    access: Access,
) -> None:
    """A new token."""
    owner = await access.find(account)
    token, secret = await access.accounts.mint(
        owner.id, name, grant.expires_at(None), grant.changed(Grant()), limits.changed(NO_LIMITS)
    )
    await access.note(token.account_id, "token.create", token.id, **_detail(token))
    _print_secret(token, secret, json)


@app.command(name="list")
async def list_tokens(account: AccountRef, /, *, json: Json = False, access: Access) -> None:
    """An account's tokens, oldest first."""
    tokens = list(await access.accounts.tokens((await access.find(account)).id))
    print_either(json, [token_json(token) for token in tokens], lambda: _print_tokens(tokens))


@app.command
async def change(
    token: TokenId,
    /,
    *,
    name: Annotated[str | None, Parameter(help="for people")] = None,
    grant: GrantOptions = _NO_GRANT,
    limits: LimitOptions = NO_CHANGE,
    json: Json = False,
    access: Access,
) -> None:
    """Say a token's name, expiry, grant or limits anew."""
    before = await access.accounts.token(token)
    after = structs.replace(
        before,
        name=before.name if name is None else name,
        expires_at=grant.expires_at(before.expires_at),
        grant=grant.changed(before.grant),
        limits=limits.changed(before.limits),
    )
    if after != before:
        after = await access.accounts.update_token(before.id, after.name, after.expires_at, after.grant, after.limits)
        await access.note(after.account_id, "token.change", after.id, **_detail(after))
    print_either(json, token_json(after), lambda: _print_tokens([after]))


@app.command
async def roll(
    token: TokenId,
    /,
    *,
    grace: Annotated[Duration, Parameter(help="for how long the old one opens yet")] = 0.0,
    json: Json = False,
    access: Access,
) -> None:
    """A new secret for a token."""
    rolled, secret = await access.accounts.roll(token, grace)
    await access.note(rolled.account_id, "token.roll", rolled.id, grace_s=grace)
    _print_secret(rolled, secret, json)


@app.command
async def revoke(token: TokenId, /, *, json: Json = False, access: Access) -> None:
    """End a token for good."""
    before = await access.accounts.token(token)
    await access.accounts.revoke(before.id)
    await access.note(before.account_id, "token.revoke", before.id)
    print_either(json, {"token_id": token, "revoked": True}, lambda: print(f"{token} is revoked"))


def _print_secret(token: ApiToken, secret: str, as_json: bool) -> None:
    """On stdout the token is alone, so that a shell can take it."""
    print_either(as_json, {**token_json(token), "token": secret}, lambda: print(secret, flush=True))
    if not as_json:
        print(f"\nThe token is shown this once: keep it. Its id is {token.id}.", file=sys.stderr)


def _detail(token: ApiToken) -> dict[str, Any]:
    """What the audit log keeps of it."""
    return {"name": token.name, "expires_at": token.expires_at, "grant": token.grant, "limits": token.limits}


def _print_tokens(tokens: list[ApiToken]) -> None:
    rows = [
        (
            token.id, token.name, ",".join(token.grant.permissions), ",".join(token.grant.models),
            ",".join(token.grant.networks) or "-", limits_text(token.limits),
            time_text(token.created_at), time_text(token.expires_at), time_text(token.revoked_at),
        )
        for token in tokens
    ]  # fmt: skip
    print_table(_HEADS, rows)
