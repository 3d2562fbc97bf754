"""The scope in which a request shares cached prefixes, and the scheduling terms of its account at a replica.

Both follow from the caller's account, its token and the request; a request can only narrow them.
"""

import hashlib

from engine.protocol.types import SchedulingTerms, Scope, ScopeKind
from gateway.errors import bad_input
from gateway.http.exchange import Exchange
from tenants.auth.caller import Caller
from tenants.records.accounts import cache_retention_s


def zero_retention_of(exchange: Exchange, caller: Caller) -> bool:
    """Whether nothing of this request may be kept: by its account's settings, or by its header `cf-aig-zdr: true`."""
    header = exchange.headers.get(b"cf-aig-zdr", b"").strip().lower()
    if header not in (b"", b"true", b"false"):
        raise bad_input("the header 'cf-aig-zdr' is true or false")
    return caller.account.settings.zero_retention or header == b"true"


def scope_of(caller: Caller, user: str | None, zero_retention: bool) -> Scope:
    """The cached prefixes that the request may read and add to.

    A request that itself asks for zero retention shares with no other. Where prefixes are kept apart by user, a request
    without a `user` shares with no other either.
    """
    account = caller.account
    alone = Scope(ScopeKind.REQUEST, account=caller.account_scope)
    if account.settings.cache_scope == "request" or (zero_retention and not account.settings.zero_retention):
        return alone
    if account.settings.cache_scope == "user":
        if not user:
            return alone
        user_id = hashlib.blake2b(user.encode(), digest_size=16, key=caller.scope, person=b"hearth user").digest()
        return Scope(ScopeKind.USER, user_id, caller.scope_epoch, account=caller.account_scope)
    return Scope(ScopeKind.TENANT, caller.scope, caller.scope_epoch, account=caller.account_scope)


def terms_of(caller: Caller, zero_retention: bool, *, background: bool = False) -> SchedulingTerms:
    """How the account's plan and settings have the replica schedule its sequences."""
    plan, settings = caller.account.plan, caller.account.settings
    return SchedulingTerms(
        weight=plan.weight,
        sequences=plan.sequences,
        blocks=plan.kv_blocks,
        floor_blocks=plan.floor_blocks,
        cap_blocks=plan.cap_blocks,
        keep_s=cache_retention_s(settings),
        erase=zero_retention,
        background=background,
    )
