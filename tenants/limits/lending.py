"""The home cell's side of leases: slices of an account's budgets for other cells, each one a reservation in this cell's
ledger. It knows no network.

A lease is a hold like a call's, in the same decision, and it is checkpointed at its whole amount before anybody hears
of it. So a lease of which nothing is heard any more is charged whole once it expires, and what was lent can never be
spent twice, whatever is lost, cut off, late or said twice, and whatever any clock shows. When the borrower settles it,
also after that, it is charged at what was used.
"""

import time
from typing import Final

import msgspec
from msgspec import structs

from tenants.limits.caps import RequestSize, caps_of, limited_subjects
from tenants.records.holds import BUDGETS, DenialReason, Denied, Granted, Hold
from tenants.records.limits import NO_LIMITS
from tenants.records.usage import EXPIRED, MICRO, UsageRecord, day_of
from tenants.store.protocol import Clock, Store

LEASE_S: Final = 60.0  # for so long calls begin on a lease, by the borrower's clock, from before it was asked for
MARGIN_S: Final = 15.0  # after which home takes a lease for lost: a borrower's clock may be so much slower in LEASE_S
LENT_SHARE: Final = 0.03  # of a budget that all other cells together hold in one lease each; 5 % with what comes back
LEFT_SHARE: Final = 4  # a lease is at most a quarter of what is left
ENDED: Final = "lease"  # the outcome of a lease that was settled
DENIED_KEPT_S: Final = 120  # a question that was denied, and comes again so late, is denied again


class LeaseRequest(msgspec.Struct, frozen=True, array_like=True):
    """A borrower's question for so many micro-neurons. `needed` are enough for the call that waits, and with
    `min_needed` it can do. `subjects` are those that the call is counted for beside its account, a line each."""

    account_id: str
    lease_id: str
    token_id: str
    model_class: str
    subjects: str
    wanted: int
    needed: int
    min_needed: int


class LeaseReturn(msgspec.Struct, frozen=True, array_like=True):
    """The use of a lease that takes no more calls, or of one that came to nothing. `day` is the one that it was granted
    from, 0 where that is not known."""

    account_id: str
    lease_id: str
    token_id: str
    subjects: str
    day: int
    micro_neurons: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class LeaseRefused(Exception):
    """A cell asks for what it may not have, or knows the account otherwise than its home does; nothing was lent."""


class QuotaLender:
    """Lends from the store of this cell; `others` is how many cells there are beside it."""

    def __init__(self, store: Store, others: int, clock: Clock = time.time) -> None:
        self._store = store
        self._others = max(others, 1)
        self._clock = clock

    async def lend(self, cell: str, request: LeaseRequest) -> Granted | Denied:
        """Reserves a slice for the cell. The same request again gets the same answer, and counts once.

        Raises LeaseRefused, StoreUnavailable; then it may be reserved, and the borrower is to settle it.
        """
        _require_own(cell, request.lease_id)
        before = await self._store.claims.claim(request.account_id, _claim_key(request), b"", DENIED_KEPT_S)
        if before:
            return _read_denied(before)
        decision = await self._decide(cell, request)
        if isinstance(decision, Denied):  # else the same question, late, would be granted to nobody
            value = msgspec.msgpack.encode(decision)
            await self._store.claims.replace(request.account_id, _claim_key(request), value, DENIED_KEPT_S)
        return decision

    async def _decide(self, cell: str, request: LeaseRequest) -> Granted | Denied:
        account = await self._store.accounts.get(request.account_id)
        if account is None or account.home:
            return Denied(DenialReason.NO_ACCOUNT)
        row = await self._store.accounts.token(request.token_id)
        token_limits = NO_LIMITS if row is None else row[0].limits
        subjects = limited_subjects(account.limits, request.token_id, token_limits, request.model_class)
        if "\n".join(subject for subject, _ in subjects if subject) != request.subjects:
            raise LeaseRefused("limits of the account or its token have changed since; ask again")
        size = RequestSize(request.needed, request.min_needed)
        budgets = [cap for cap in caps_of(subjects, size) if cap.measure in BUDGETS]
        amount = max(request.wanted, request.needed)
        for cap, left in zip(budgets, await self._store.quotas.remaining(account.id, budgets), strict=True):
            slice_max = min(left // LEFT_SHARE, int(cap.allowed * LENT_SHARE) // self._others)
            amount = min(amount, max(slice_max, request.needed))
        unused = self._record(cell, request, EXPIRED)
        caps = tuple(structs.replace(cap, amount=amount) for cap in budgets)
        lifetime_us = int((LEASE_S + MARGIN_S) * MICRO)
        granted = await self._store.quotas.reserve(Hold(unused, amount, lifetime_us, caps, strict=account.plan.strict))
        if isinstance(granted, Granted):
            whole = structs.replace(unused, day=granted.day, micro_neurons=granted.held)
            await self._store.quotas.checkpoint([whole], lifetime_us)
        return granted

    async def settle(self, cell: str, returned: LeaseReturn) -> None:
        """Charges what was used of a lease, once. Raises LeaseRefused, StoreUnavailable."""
        _require_own(cell, returned.lease_id)
        used = {name: getattr(returned, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
        record = self._record(cell, returned, ENDED)
        day = returned.day or record.day
        await self._store.quotas.settle(
            [structs.replace(record, day=day, micro_neurons=returned.micro_neurons, **used)]
        )

    def _record(self, cell: str, lease: LeaseRequest | LeaseReturn, outcome: str) -> UsageRecord:
        now_us = int(self._clock() * MICRO)
        return UsageRecord(
            account_id=lease.account_id,
            request_id=lease.lease_id,
            day=day_of(now_us),
            micro_neurons=0,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            outcome=outcome,
            token_id=lease.token_id,
            model=f"cell/{cell}",
            started_us=now_us,
            total_ms=0.0,
            subjects=lease.subjects,
        )


_read_denied = msgspec.msgpack.Decoder(Denied).decode


def _claim_key(request: LeaseRequest) -> str:
    return f"lease:{request.lease_id}"


def _require_own(cell: str, lease_id: str) -> None:
    """A lease's id begins with its borrower's name, so that no cell settles what is another's, or a call's."""
    if not lease_id.startswith(f"{cell}."):
        raise LeaseRefused(f"{lease_id!r} is no lease of the cell {cell}")
