"""Quotas: neurons are reserved before a request runs and settled exactly once after. It knows no routes.

    reserve ─► [checkpoint …] ─► settle ─► run() writes it to the store ──► ledger
                                              └─ store away ─► outbox (fsync) ─► replayed when it is back

A reservation is a hold in the store that lasts HOLD_S unless it is renewed; run() renews every open one each
CHECKPOINT_S with what its request used so far. So a killed gateway costs nobody more than that: its holds expire and
are charged at their last checkpoints, and settlements in its outbox are replayed by the next gateway on the machine.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import structs

from tenants.auth.caller import Caller
from tenants.auth.errors import HomeUnavailable
from tenants.limits.borrowing import QuotaBorrower
from tenants.limits.caps import LimitStatus, RequestSize, caps_of, limited_subjects, limits_status, unattainable
from tenants.limits.denials import denial_error
from tenants.limits.lending import LeaseRefused
from tenants.limits.outbox import Outbox
from tenants.limits.reservation import CallUsage, Overdrawn, QuotaRequest, Reservation
from tenants.records.accounts import Account
from tenants.records.holds import BUDGETS, Cap, DenialReason, Denied, Granted, Hold, window_us_left
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.usage import EXPIRED, MICRO, UsageRecord, day_of
from tenants.store.protocol import Clock, QuotaStore, StoreUnavailable

HOLD_S: Final = 60.0
CHECKPOINT_S: Final = 5.0
SWEEP_S: Final = 10.0
REPLAY_S: Final = 1.0
SETTLE_BATCH: Final = 256  # settlements or checkpoints in one call of the store
LEASE_TRIES: Final = 4  # leases that others spend before a call gets to them
UNSETTLED_MAX: Final = 100_000  # open reservations and settlements not yet written

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenReservation:
    reservation: Reservation
    spent: CallUsage
    written_s: float  # when the store last heard of it


class Quota:
    """Reservations of one gateway process. Everything here is called from one event loop. `borrower` has leases for
    accounts whose home is another cell."""

    def __init__(
        self, store: QuotaStore, outbox: Path, clock: Clock = time.time, borrower: QuotaBorrower | None = None
    ) -> None:
        self._store = store
        self._borrower = borrower
        self._outbox = Outbox(outbox)
        self._clock = clock
        self._open: dict[tuple[str, str], _OpenReservation] = {}  # oldest written first
        self._settled: deque[UsageRecord] = deque()  # not yet in the store or the outbox
        self._woken = asyncio.Event()
        self._draining = asyncio.Lock()

    @property
    def open(self) -> int:
        """Reservations that are not settled."""
        return len(self._open)

    @property
    def unwritten(self) -> int:
        """Settlements that are neither in the store nor in the outbox yet."""
        return len(self._settled)

    async def reserve(
        self, caller: Caller, request_id: str, demand: QuotaRequest, *, again: bool = False
    ) -> Reservation:
        """Holds the most that this request can cost. One call of the store: about 30 µs on SQLite, 150 µs on Redis.

        `request_id` is new for every request and at most 64 characters; a repeated call with the same one is granted
        again and counted once. Raises QuotaExceeded, StoreUnavailable, UnknownToken when the token was revoked since it
        was verified, AccountSuspended, AlreadyRecorded, HomeUnavailable. When it raises nothing is held; what a store
        took too late is given back as soon as it takes settlements again; but for one that is made `again` under its
        id whatever comes of it, which then finds its hold.
        """
        if len(self._open) + len(self._settled) >= UNSETTLED_MAX:
            raise StoreUnavailable(f"{UNSETTLED_MAX:,} requests are open or wait to be written; try again later")
        started_us = int(self._clock() * MICRO)
        subjects = limited_subjects(caller.limits, caller.token_id, caller.token_limits, demand.model_class)
        size = demand.size()
        unused = UsageRecord(
            account_id=caller.account.id,
            request_id=request_id,
            day=day_of(started_us),
            micro_neurons=0,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            outcome=EXPIRED,
            token_id=caller.token_id,
            model=demand.model,
            started_us=started_us,
            total_ms=0.0,
            subjects="\n".join(subject for subject, _ in subjects if subject),
            tags="\n".join(demand.tags),
            metadata=demand.metadata,
        )
        caps = caps_of(subjects, size)
        strict = caller.account.plan.strict
        hold = Hold(unused, size.micro_neurons, int(HOLD_S * MICRO), caps, demand.output_tokens, strict)
        if caller.account.home:
            hold, decision = await self._reserve_on_lease(caller.account.home, demand, hold)
        else:
            decision = await self._reserve(hold, again=again)
        if isinstance(decision, Denied):
            raise denial_error(decision, caller, hold.caps)
        charged = structs.replace(hold.record, day=decision.day)
        output_tokens = demand.affordable(decision.held)
        left = limits_status(hold.caps, decision.remaining, started_us)
        granted = Reservation(charged, demand.price, decision.held, output_tokens, left)
        return self._open.setdefault(granted.key, _OpenReservation(granted, CallUsage(), self._clock())).reservation

    async def _reserve(self, hold: Hold, *, again: bool = False) -> Granted | Denied:
        """The store's decision. What it may have granted without a word is settled as unused, unless it is asked for
        again under this id: that settlement would be the last word on it, and what is used then free of charge."""
        try:
            return await self._store.reserve(hold)
        except asyncio.CancelledError:
            if not again:
                self._write_later(structs.replace(hold.record, outcome="cancelled"))
            raise
        except StoreUnavailable as outage:
            if outage.unsure and not again:
                self._write_later(structs.replace(hold.record, outcome="store_unavailable"))
            raise

    async def _reserve_on_lease(self, home: str, demand: QuotaRequest, hold: Hold) -> tuple[Hold, Granted | Denied]:
        """The decision on a call of an account that has another home, and the hold with the lease that it is on."""
        if self._borrower is None:
            raise HomeUnavailable(f"this gateway knows no cell {home}, where the account is kept", unsure=False)
        size, spent = demand.size(), None
        for _ in range(LEASE_TRIES):
            try:
                borrowed = await self._borrower.borrow(hold, home, demand.model_class, size, spent)
            except LeaseRefused as refusal:
                raise HomeUnavailable(f"the home cell {home} lends nothing now: {refusal}") from None
            if isinstance(borrowed, Denied):
                cap = Cap(
                    borrowed.subject, borrowed.reason, size.micro_neurons, borrowed.allowed, size.min_micro_neurons
                )
                return structs.replace(hold, caps=(cap,)), borrowed
            decision = await self._reserve(borrowed.hold)
            if isinstance(decision, Granted):
                self._borrower.note_left(borrowed, demand.model_class, decision.remaining[-1])
            elif decision.reason is DenialReason.LEASE:
                spent = borrowed.lease
                continue
            return borrowed.hold, decision
        raise HomeUnavailable(f"calls of this account use leases of the cell {home} up as they come", unsure=False)

    async def count_refused(self, caller: Caller) -> None:
        """Counts a request that was refused before it was reserved, for the account's and the token's requests per
        minute. Raises QuotaExceeded where there is no room, and StoreUnavailable."""
        subjects = limited_subjects(caller.limits, caller.token_id, caller.token_limits, "")
        caps = [cap for cap in caps_of(subjects, RequestSize()) if cap.measure is DenialReason.REQUESTS_PER_MINUTE]
        denied = await self._store.count(caller.account.id, caps) if caps else None
        if denied is not None:
            raise denial_error(denied, caller, caps)

    async def limits_left(
        self, account: Account, token_id: str = "", token: Limits = NO_LIMITS
    ) -> Sequence[LimitStatus]:
        """The rest of the account's limits and of one of its tokens' now, with those of all classes."""
        caps = _all_caps(account, account.limits, token_id, token)
        return limits_status(caps, await self._store.remaining(account.id, caps), int(self._clock() * MICRO))

    async def overdrawn(self, caller: Caller) -> Overdrawn:
        """The budgets of which more is used and held than the caller's limits allow by now. One call of the store."""
        all_caps = _all_caps(caller.account, caller.limits, caller.token_id, caller.token_limits)
        caps = [cap for cap in all_caps if cap.measure in BUDGETS]
        left = await self._store.remaining(caller.account.id, caps) if caps else ()
        rests = zip(caps, left, strict=True)
        return {(cap.subject, cap.measure): cap.allowed - rest for cap, rest in rests if rest < 0}

    def check_limits(self, caller: Caller, demand: QuotaRequest, overdrawn: Overdrawn) -> None:
        """Raises QuotaExceeded where the limits of the caller leave no room for a request that was granted earlier: it
        takes more of one than there ever is, or a budget of it is overdrawn. What only holds a new one up, a full rate
        or many requests at once, ends nothing."""
        subjects = limited_subjects(caller.limits, caller.token_id, caller.token_limits, demand.model_class)
        caps = caps_of(subjects, demand.size())
        for cap in caps:
            used = overdrawn.get((cap.subject, cap.measure), 0)
            if used or unattainable(cap):
                wait_us = window_us_left(cap.measure, int(self._clock() * MICRO)) if cap.measure in BUDGETS else 0
                raise denial_error(Denied(cap.measure, wait_us, cap.allowed, used, cap.subject), caller, caps)

    def checkpoint(self, reservation: Reservation, spent: CallUsage) -> None:
        """Remembers what the request has used so far; run() tells the store. Ignored once it is settled."""
        opened = self._open.get(reservation.key)
        if opened is not None:
            opened.spent = spent

    def settle(self, reservation: Reservation, spent: CallUsage) -> None:
        """The end of a request: what it really used. Never blocks, never raises; only the first call counts."""
        if self._open.pop(reservation.key, None) is not None:
            self._write_later(reservation.record(spent, spent.outcome))

    def _write_later(self, record: UsageRecord) -> None:
        self._settled.append(record)
        self._woken.set()

    def forget(self, reservation: Reservation) -> None:
        """Drops a reservation that another writer settles, or that runs again under the same id."""
        self._open.pop(reservation.key, None)

    async def run(self) -> None:
        """Writes settlements, renews holds, sweeps expired ones and replays the outbox, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._drain())
            tasks.create_task(self._every(CHECKPOINT_S / 5, self.renew))
            tasks.create_task(self._every(REPLAY_S, self.replay))
            tasks.create_task(self._every(SWEEP_S, self._store.sweep))

    async def _drain(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            await self.flush()

    async def _every(self, seconds: float, act: Callable[[], Awaitable[object]]) -> None:
        """Repeats `act`, however long the store or the disk is away; the log has the beginning and end of an outage."""
        waits = False
        while True:
            await asyncio.sleep(seconds)
            try:
                await act()
            except (StoreUnavailable, OSError) as problem:
                if not waits:
                    log.warning("quota_waits", extra={"fields": {"for": str(problem)}})
                waits = True
            else:
                if waits:
                    log.info("quota_goes_on")
                waits = False

    async def flush(self) -> None:
        """Writes every settlement so far to the store or, when it is away, to the outbox. Where both fail
        settlements stay in memory, and the next call tries again."""
        async with self._draining:
            while self._settled:
                batch = list(islice(self._settled, SETTLE_BATCH))
                try:
                    await self._store.settle(batch)
                except StoreUnavailable as outage:
                    if not await self._append_to_outbox(batch, outage):
                        return
                for _ in batch:
                    self._settled.popleft()

    async def _append_to_outbox(self, batch: Sequence[UsageRecord], outage: StoreUnavailable) -> bool:
        try:
            await asyncio.to_thread(self._outbox.append, batch)
        except OSError as error:
            log.error("%d settlements wait in memory: %s; the outbox fails too: %s", len(batch), outage, error)
            return False
        log.warning("%d settlements went to the outbox: %s", len(batch), outage)
        return True

    async def renew(self) -> None:
        """Tells the store what open requests have used, each every CHECKPOINT_S, so that their holds last."""
        while due := list(islice(self._renewals_due(), SETTLE_BATCH)):
            now_s = self._clock()
            records = []
            for key in due:
                opened = self._open.pop(key)
                opened.written_s = now_s
                self._open[key] = opened
                records.append(opened.reservation.record(opened.spent, EXPIRED))
            await self._store.checkpoint(records, int(HOLD_S * MICRO))
            await asyncio.sleep(0)

    def _renewals_due(self) -> Iterator[tuple[str, str]]:
        now_s = self._clock()
        for key, opened in self._open.items():
            if 0 <= now_s - opened.written_s < CHECKPOINT_S:
                return
            yield key

    async def replay(self) -> None:
        """Writes what waits in memory and in the outbox, this gateway's and dead ones', to the store.

        Raises StoreUnavailable, and OSError for a file that cannot be read or removed, once the others are done.
        """
        await self.flush()
        problem: OSError | None = None
        async with self._draining:
            for path in self._outbox.waiting():
                try:
                    await self._replay(path)
                except OSError as error:
                    problem = error
        if problem is not None:
            raise problem

    async def _replay(self, path: Path) -> None:
        records, damaged = await asyncio.to_thread(self._outbox.read, path)  # of a long outage 100,000 lines
        for start in range(0, len(records), SETTLE_BATCH):
            await self._store.settle(records[start : start + SETTLE_BATCH])
        self._outbox.remove(path, damaged)
        log.warning("replayed %d settlements from %s; %d damaged lines", len(records), path.name, damaged)

    async def close(self) -> None:
        """Writes the last settlements and checkpoints. Call it when run() has ended."""
        await self.flush()
        if self._settled:
            log.error("%d settlements end with this process; their holds are charged as checkpointed", self.unwritten)
        for opened in self._open.values():
            opened.written_s = -math.inf
        try:
            await self.renew()
        except StoreUnavailable as outage:
            log.warning("%d open requests keep their older checkpoints: %s", self.open, outage)
        self._outbox.close()

    def check(self) -> None:
        """Raises AssertionError where this process would settle a request twice or never."""
        waiting = [(record.account_id, record.request_id) for record in self._settled]
        assert len(waiting) == len(set(waiting)), "a request is settled twice"
        assert not self._open.keys() & set(waiting), "an open request is settled"
        assert len(self._open) + len(waiting) <= UNSETTLED_MAX


def _all_caps(account: Account, limits: Limits, token_id: str, token: Limits) -> tuple[Cap, ...]:
    """The caps of the account's limits and of one of its tokens', with those of all classes; without budgets where
    they are counted in another cell."""
    classes = sorted(limits.classes.keys() | token.classes.keys())
    pairs = [pair for name in ("", *classes) for pair in limited_subjects(limits, token_id, token, name)]
    caps = caps_of(list(dict(pairs).items()), RequestSize())
    return tuple(cap for cap in caps if not account.home or cap.measure not in BUDGETS)
