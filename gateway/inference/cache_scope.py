"""With whom a request may share cached prefixes, and how its account is treated beside others at a replica.

It decides from the caller's account, its token and its own words alone; a caller's words only ever narrow it.
"""

import hashlib

from engine.protocol.types import SchedulingTerms, Scope, ScopeKind
from gateway.errors import bad_input
from gateway.http.exchange import Exchange
from tenants.auth.caller import Caller
from tenants.records.settings import cache_retention_s


def zero_retention_of(exchange: Exchange, caller: Caller) -> bool:
    """Whether nothing of this request may be kept: by its account's settings, or by its own `cf-aig-zdr: true`."""
    said = exchange.headers.get(b"cf-aig-zdr", b"").strip().lower()
    if said not in (b"", b"true", b"false"):
        raise bad_input("the header 'cf-aig-zdr' is true or false")
    return caller.account.settings.zero_retention or said == b"true"


def scope_of(caller: Caller, user: str | None, zero: bool) -> Scope:
    """Whose cached prefixes the request may read and add to.

    A request that alone asks for zero retention shares with nobody. Where prefixes are kept apart by user, one without
    a `user` shares with nobody either.
    """
    account = caller.account
    alone = Scope(ScopeKind.REQUEST, account=caller.account_scope)
    if account.settings.cache_scope == "request" or (zero and not account.settings.zero_retention):
        return alone
    if account.settings.cache_scope == "user":
        if not user:
            return alone
        of_user = hashlib.blake2b(user.encode(), digest_size=16, key=caller.scope, person=b"hearth user").digest()
        return Scope(ScopeKind.USER, of_user, account.epoch, account=caller.account_scope)
    return Scope(ScopeKind.TENANT, caller.scope, account.epoch, account=caller.account_scope)


def terms_of(caller: Caller, zero: bool, *, background: bool = False) -> SchedulingTerms:
    plan, settings = caller.account.plan, caller.account.settings
    return SchedulingTerms(
        weight=plan.weight,
        sequences=plan.sequences,
        blocks=plan.kv_blocks,
        floor_blocks=plan.floor_blocks,
        cap_blocks=plan.cap_blocks,
        keep_s=cache_retention_s(settings),
        erase=zero,
        background=background,
    )
