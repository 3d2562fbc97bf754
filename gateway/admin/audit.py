"""The audit log as it is read: an account's by its administrators and the operator, and whether a chain is whole."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.admin.operation import (
    ACCOUNT,
    FOR_ADMIN,
    FOR_OPERATOR,
    OPERATOR,
    AdminContext,
    AdminRequest,
    AdminResult,
    CursorItem,
    NoFields,
    Operation,
    Time,
    time_of,
)
from tenants.audit import SYSTEM
from tenants.records.accounts import AuditEntry
from tenants.records.grants import Permission

CHUNK: Final = 500  # entries in one call of the store
LOOKED_AT_MAX: Final = 10_000  # entries for one answer; the cursor goes on from there
_Word = Annotated[str, Meta(max_length=200)]


class AuditQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest first. `cursor` is that of the answer before; a page of a filtered list may be short, and even empty,
    while it has a cursor."""

    action: _Word | None = None
    actor: _Word | None = None
    since: Time | None = None
    before: Time | None = None
    cursor: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    per_page: Annotated[int, Meta(ge=1, le=100)] = 20


class ChainQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chain of an account, by its id or name, or of what concerns no one account; `head` is a seal that was told
    before."""

    account: _Word | None = None
    head: Annotated[str, Meta(pattern="^[0-9a-f]{64}$(?!\\n)")] | None = None


class EntryItem(msgspec.Struct, frozen=True):
    """`actor_name` and `target_name` are what the token or account is called now; null where it is neither, or gone.
    Whoever is no operator learns names of the own account alone."""

    seq: int
    at: datetime
    actor: str
    action: str
    target: str
    detail: dict[str, Any]
    seal: str
    actor_name: str | None = None
    target_name: str | None = None


class VerdictItem(msgspec.Struct, frozen=True):
    """If `intact` is false, `problem` is what is wrong at entry `seq`; `head` is the last good seal."""

    intact: bool
    entries: int
    head: str
    seq: int
    problem: str | None


async def listed(context: AdminContext, request: AdminRequest[AuditQuery, NoFields]) -> AdminResult[list[EntryItem]]:
    """Walks back from the cursor, or from the end; a path that names no account has the system's chain."""
    query, chain = request.query, request.account_id or SYSTEM
    if chain != SYSTEM:
        await context.accounts.get(chain)
    head = await context.store.audit.head(chain)
    after = min(query.cursor or 1 << 53, 0 if head is None else head.seq + 1)  # the first that was shown already
    last = max(1, after - LOOKED_AT_MAX)
    entries: list[AuditEntry] = []
    while after > last and len(entries) < query.per_page:
        first = max(last, after - CHUNK)
        chunk = await context.store.audit.entries(chain, first, after - first)
        for entry in reversed(chunk):
            after = entry.seq
            if _matches(entry, query):
                entries.append(entry)
                if len(entries) == query.per_page:
                    break
    page = CursorItem(len(entries), query.per_page, after if after > 1 else None)
    known = await context.accounts.names({each for entry in entries for each in (entry.actor, entry.target)})
    may_all = Permission.OPERATOR in request.caller.grant.permissions
    names = {each: name for each, (name, owner) in known.items() if may_all or owner == chain}
    return AdminResult([_item(entry, names) for entry in entries], page=page)


async def verify(context: AdminContext, request: AdminRequest[ChainQuery, NoFields]) -> AdminResult[VerdictItem]:
    account = request.query.account
    chain = SYSTEM if account is None else (await context.accounts.find(account)).id
    verdict = await context.audit.verify(chain, request.query.head)
    return AdminResult(
        VerdictItem(verdict.problem is None, verdict.entries, verdict.head, verdict.seq, verdict.problem)
    )


def _matches(entry: AuditEntry, query: AuditQuery) -> bool:
    return (
        query.action in (None, entry.action)
        and query.actor in (None, entry.actor)
        and (query.since is None or entry.at >= query.since.timestamp())
        and (query.before is None or entry.at < query.before.timestamp())
    )


def _item(entry: AuditEntry, names: Mapping[str, str]) -> EntryItem:
    return EntryItem(
        *(entry.seq, time_of(entry.at), entry.actor, entry.action, entry.target, msgspec.json.decode(entry.detail)),
        *(entry.seal, names.get(entry.actor), names.get(entry.target)),
    )


OPERATIONS: Final = (
    Operation(
        "GET", f"{ACCOUNT}/audit", listed, FOR_ADMIN, "Who did what to the account, the newest first", cursor=True
    ),
    Operation(
        "GET",
        f"{OPERATOR}/accounts/{{account_id}}/audit",
        listed,
        FOR_OPERATOR,
        "Who did what to this account, the newest first",
        cursor=True,
    ),
    Operation(
        "GET",
        f"{OPERATOR}/audit",
        listed,
        FOR_OPERATOR,
        "Who did what that concerns no one account, the newest first",
        cursor=True,
    ),
    Operation(
        "GET", f"{OPERATOR}/audit/verify", verify, FOR_OPERATOR, "Whether a chain of the audit log is as it was written"
    ),
)
