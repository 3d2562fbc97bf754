"""An account's prefix cache: how much of its prompts was found there, and making all of it unfindable."""

from typing import Final

import msgspec

from gateway.admin.operation import (
    ACCOUNT,
    FOR_ADMIN,
    FOR_READER,
    AdminContext,
    AdminRequest,
    AdminResult,
    NoFields,
    Operation,
)
from gateway.admin.usage import DaysQuery, span
from tenants.records.accounts import cache_retention_s


class CacheItem(msgspec.Struct, frozen=True):
    """`cached_tokens` of the `prompt_tokens` of those days were read from the cache; `hit_ratio` is their part, null
    where there were none. `epoch` counts the purges; `keep_s` is null where prefixes stay until they are evicted."""

    epoch: int
    scope: str
    keep_s: float | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_ratio: float | None


class PurgeItem(msgspec.Struct, frozen=True):
    """Prefixes of earlier epochs are found by no request that begins a second from now."""

    epoch: int


async def show(context: AdminContext, request: AdminRequest[DaysQuery, NoFields]) -> AdminResult[CacheItem]:
    account = await context.accounts.get(request.account_id)
    usage = await context.store.quotas.usage([account.id], *span(context, request.query.from_, request.query.to), ())
    rows = usage.get(account.id, ())
    prompt_tokens, cached_tokens = sum(row.prompt_tokens for row in rows), sum(row.cached_tokens for row in rows)
    return AdminResult(
        CacheItem(
            epoch=account.epoch,
            scope=account.settings.cache_scope,
            keep_s=cache_retention_s(account.settings),
            requests=sum(row.requests for row in rows),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            hit_ratio=cached_tokens / prompt_tokens if prompt_tokens else None,
        )
    )


async def purge(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[PurgeItem]:
    account = await context.accounts.purge_cache(request.account_id)
    context.encodings.reach_epoch(account.id, account.epoch)
    await context.note(request.caller, account.id, "account.purge_cache", account.id, epoch=account.epoch)
    return AdminResult(PurgeItem(account.epoch))


OPERATIONS: Final = (
    Operation("GET", f"{ACCOUNT}/cache", show, FOR_READER, "How much of the account's prompts its cache had"),
    Operation("POST", f"{ACCOUNT}/cache/purge", purge, FOR_ADMIN, "Make all that is cached for the account unfindable"),
)
