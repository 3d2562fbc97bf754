"""The borrower's side of leases: calls of accounts that have their home in another cell are reserved here, against
slices of their budgets that it has lent. It knows no network.

    ASKED ─► OPEN ─► CLOSED ─► RETURNED
      │ home grants    │ over, spent or replaced; calls that run end
      └────────────────┘ home denies, or nothing is heard: returned as unused

Every lease is in this cell's store before its home hears of it, and until home has settled it; so whichever gateway is
killed, another one gives back what is left. Calls wait for the home cell only where no lease has room for them. A cell
that is cut off spends what it holds, for at most LEASE_S.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec import structs

from tenants.auth.errors import HomeUnavailable
from tenants.limits.caps import RequestSize
from tenants.limits.lending import LEASE_S, LeaseRefused, LeaseRequest, LeaseReturn
from tenants.records.holds import BUDGETS, Cap, DenialReason, Denied, Granted, Hold
from tenants.records.leases import LeaseState, QuotaLease
from tenants.records.usage import MICRO
from tenants.store.protocol import LeaseStore, StoreUnavailable

TICK_S: Final = 1.0
AWAY_S: Final = 1.0  # for so long a home cell that did not answer is not asked again
DENIED_S: Final = 1.0  # for so long home is not asked for what it denied
FIRST_CALLS: Final = 4  # a first lease is for so many calls like the one that asks
REFILL_SHARE: Final = 4  # the next lease is asked for when a quarter of one is left
RENEW_SHARE: Final = 2 / 3  # of a lease's life, after which a call that begins on it asks for the next one
BUSY_SHARE: Final = 1 / 3  # a lease that is spent within this part of its life is followed by one twice as large
IDLE_SHARE: Final = 4  # one of which less than a quarter was used, by one half as large
WANTED_MAX: Final = 1 << 50  # Lua counts exactly so far

log = logging.getLogger(__name__)


class HomeCells(Protocol):
    """The other cells. Raises HomeUnavailable, and LeaseRefused."""

    async def lend(self, home: str, request: LeaseRequest) -> Granted | Denied: ...

    async def settle(self, home: str, returned: LeaseReturn) -> None: ...


@dataclass(slots=True)
class _Line:
    """Calls of one account that are counted for the same subjects, in this gateway."""

    wanted: int = 0
    lease: QuotaLease | None = None
    left: int = 0  # of the lease, as the last call saw it
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    refill: LeaseRequest | None = None
    home: str = ""
    denied: Denied | None = None  # home's last answer, until `denied_until_s`
    denied_until_s: float = 0.0
    denied_min: int = 0  # micro-neurons that were too many

    def in_use(self, now_s: float) -> bool:
        """Whether it has a lease, or home's answer on one, or waits for it."""
        return bool(self.lease or self.refill) or self.asking.locked() or now_s < self.denied_until_s


@dataclass(frozen=True, slots=True)
class BorrowedHold:
    """A call's hold on a lease."""

    hold: Hold
    lease: QuotaLease


class QuotaBorrower:
    """Leases of one gateway of the cell of this name. `clock` is in seconds, and only paces."""

    def __init__(
        self,
        store: LeaseStore,
        homes: HomeCells,
        cell: str,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        self._store = store
        self._homes = homes
        self._cell = cell
        self._clock = clock
        self._new_id = new_id
        self._lines: dict[tuple[str, str], _Line] = {}
        self._begun_s: dict[str, float] = {}  # of open leases, by their ids
        self._abandoned: dict[str, QuotaLease] = {}
        self._away_until_s: dict[str, float] = {}
        self._woken = asyncio.Event()

    async def borrow(
        self, hold: Hold, home: str, model_class: str, size: RequestSize, spent: QuotaLease | None
    ) -> BorrowedHold | Denied:
        """Puts a call's hold on a lease with room for it as far as this gateway knows; `spent` is one without.

        Budgets of the account are not compared here but at its home, which is asked where there is no lease. Raises
        HomeUnavailable, StoreUnavailable; then nothing is held.
        """
        record = hold.record
        line = self._lines.setdefault((record.account_id, record.subjects), _Line())
        line.home = home
        lease = line.lease
        if lease is None or (spent is not None and lease.id == spent.id):
            request = LeaseRequest(record.account_id, "", record.token_id, model_class, record.subjects, 0, *size[:2])
            answer = await self._next(line, request, size.micro_neurons)
            if isinstance(answer, Denied):
                return answer
            lease = answer
        # Where home had less than the call asks for there is no more: then the call is content with less.
        enough = size.micro_neurons if lease.amount >= size.micro_neurons else size.min_micro_neurons
        cap = Cap(lease.subject, DenialReason.LEASE, hold.held, lease.amount, enough)
        subjects = "\n".join(part for part in (record.subjects, lease.subject) if part)
        caps = (*(cap for cap in hold.caps if cap.measure not in BUDGETS), cap)
        return BorrowedHold(structs.replace(hold, record=structs.replace(record, subjects=subjects), caps=caps), lease)

    def note_left(self, borrowed: BorrowedHold, model_class: str, left: int) -> None:
        """Hears what the lease of a granted call has left, and has the next one asked for in time."""
        lease, size = borrowed.lease, borrowed.hold.held
        line = self._lines.get((lease.account_id, lease.subjects))
        if line is None or line.lease is None or line.lease.id != lease.id:
            return
        line.left = left
        if line.refill is not None:
            return
        age_s = self._clock() - self._begun_s.get(lease.id, 0.0)
        if left * REFILL_SHARE < lease.amount or age_s > RENEW_SHARE * LEASE_S:
            token_id = borrowed.hold.record.token_id
            line.refill = LeaseRequest(lease.account_id, "", token_id, model_class, lease.subjects, 0, size, size)
            self._woken.set()

    async def _next(self, line: _Line, request: LeaseRequest, room: int) -> QuotaLease | Denied:
        """Another lease than the one that the line has: that of a call which asked meanwhile, one of this cell that has
        so much room, or one from home."""
        before = line.lease
        async with line.asking:
            if line.lease is not None and (before is None or line.lease.id != before.id):
                return line.lease
            if (shared := await self._shared(line, request, room)) is not None:
                line.lease, line.left = shared, shared.amount - shared.used
                return shared
            if (
                line.denied is not None
                and self._clock() < line.denied_until_s
                and request.min_needed >= line.denied_min
            ):
                return line.denied
            self._resize(line, request.needed)
            asked = structs.replace(
                request, lease_id=f"{self._cell}.{self._new_id()}", wanted=min(line.wanted, WANTED_MAX)
            )
            answer = await self._ask(line.home, asked)
            if isinstance(answer, QuotaLease):
                line.lease, line.left = answer, answer.amount
            else:
                line.denied, line.denied_min = answer, request.min_needed
                line.denied_until_s = self._clock() + DENIED_S
            return answer

    async def _shared(self, line: _Line, request: LeaseRequest, room: int) -> QuotaLease | None:
        """The oldest lease of this cell for the same calls that has room: another gateway's, or one that calls which
        ended have given something back to."""
        for lease in await self._store.list(request.account_id):
            fits = lease.subjects == request.subjects and lease.amount - lease.used >= room
            if lease.state is LeaseState.OPEN and fits and (line.lease is None or lease.id != line.lease.id):
                self._begun_s.setdefault(lease.id, self._clock())
                return lease
        return None

    def _resize(self, line: _Line, needed: int) -> None:
        """What to ask for follows what was used: twice as much after a lease that was spent soon, half as much after
        one of which little was used."""
        if line.lease is not None:
            age_s = self._clock() - self._begun_s.get(line.lease.id, 0.0)
            if age_s < BUSY_SHARE * LEASE_S:
                line.wanted = min(2 * line.wanted, WANTED_MAX)
            elif (line.lease.amount - line.left) * IDLE_SHARE < line.lease.amount:
                line.wanted //= 2
        line.wanted = max(line.wanted, FIRST_CALLS * needed)

    async def _ask(self, home: str, request: LeaseRequest) -> QuotaLease | Denied:
        """One lease from home. Whatever comes of it, the store knows what is to be given back."""
        if self._clock() < self._away_until_s.get(home, 0.0):
            raise HomeUnavailable(f"the home cell {home} did not answer just now", unsure=False)
        account_id, lease_id = request.account_id, request.lease_id
        asked_s = self._clock()
        lease = QuotaLease(account_id, lease_id, home, request.token_id, request.subjects)
        lease = await self._store.begin(lease, int(LEASE_S * MICRO))
        try:
            granted = await self._homes.lend(home, request)
        except (HomeUnavailable, LeaseRefused) as problem:
            if isinstance(problem, HomeUnavailable):
                self._away_until_s[home] = self._clock() + AWAY_S
            await self._end_asked(lease, sure=not getattr(problem, "unsure", False))
            raise
        except asyncio.CancelledError:
            self._abandoned[lease_id] = lease
            raise
        if isinstance(granted, Denied):
            await self._end_asked(lease, sure=True)
            return granted
        if not await self._store.open(account_id, lease_id, granted.held, granted.day):
            raise HomeUnavailable(f"the home cell {home} answered too late")
        self._begun_s[lease_id] = asked_s
        return structs.replace(lease, state=LeaseState.OPEN, amount=granted.held, day=granted.day)

    async def _end_asked(self, lease: QuotaLease, *, sure: bool) -> None:
        """Ends a lease that came to nothing; where home may have granted it, tick() gives it back."""
        if sure:
            await self._store.note_returned(lease.account_id, lease.id, 0)
        else:
            await self._store.close(lease.account_id, lease.id)

    async def run(self) -> None:
        """Asks for leases ahead of calls, closes and returns those that are over, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refill_on_demand())
            tasks.create_task(self._tick_on())

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except StoreUnavailable as problem:
                log.warning("leases_wait", extra={"fields": {"for": str(problem)}})

    async def _refill_on_demand(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            for line in list(self._lines.values()):
                if line.refill is not None:
                    await self._refill(line, line.refill)

    async def _refill(self, line: _Line, request: LeaseRequest) -> None:
        try:
            await self._next(line, request, max(line.left, line.lease.amount // REFILL_SHARE) if line.lease else 0)
        except (HomeUnavailable, StoreUnavailable, LeaseRefused) as problem:
            log.info("lease_not_renewed", extra={"fields": {"account": request.account_id, "for": str(problem)}})
        finally:
            line.refill = None

    async def tick(self) -> None:
        """Closes leases without calls that newer ones have replaced, and returns closed ones whose calls have ended, as
        far as their homes answer. Raises StoreUnavailable."""
        while self._abandoned:
            lease_id, lease = next(iter(self._abandoned.items()))
            await self._store.close(lease.account_id, lease_id)
            del self._abandoned[lease_id]
        away: set[str] = set()
        leases = await self._store.list()
        newest = {(one.account_id, one.subjects): one.id for one in leases if one.state is LeaseState.OPEN}
        for lease in leases:
            replaced = newest.get((lease.account_id, lease.subjects), lease.id) != lease.id
            if lease.state is LeaseState.OPEN and replaced and not lease.open:
                await self._store.close(lease.account_id, lease.id)
            if lease.state is LeaseState.CLOSED:
                self._forget(lease)
            late = lease.state is LeaseState.RETURNED and lease.used > lease.returned
            due = not lease.open and (lease.state is LeaseState.CLOSED or late)
            if due and lease.home not in away and not await self._give_back(lease):
                away.add(lease.home)
        self._begun_s = {lease.id: self._begun_s[lease.id] for lease in leases if lease.id in self._begun_s}
        now_s = self._clock()
        self._lines = {key: line for key, line in self._lines.items() if line.in_use(now_s)}

    def _forget(self, lease: QuotaLease) -> None:
        """The next call of its line asks for another one."""
        line = self._lines.get((lease.account_id, lease.subjects))
        if line is not None and line.lease is not None and line.lease.id == lease.id:
            line.lease = None

    async def _give_back(self, lease: QuotaLease) -> bool:
        """Has home settle what was used, or what came later than that. False: home does not answer."""
        late = lease.state is LeaseState.RETURNED
        used = lease.used - lease.returned
        tokens = (0, 0, 0) if late else (lease.prompt_tokens, lease.cached_tokens, lease.completion_tokens)
        name = f"{lease.id}+{lease.returned}" if late else lease.id
        returned = LeaseReturn(lease.account_id, name, lease.token_id, lease.subjects, lease.day, used, *tokens)
        try:
            await self._homes.settle(lease.home, returned)
        except HomeUnavailable:
            return False
        except LeaseRefused as refusal:
            fields = {"account": lease.account_id, "lease": lease.id, "home": lease.home, "for": str(refusal)}
            log.error("lease_not_settled", extra={"fields": fields})
        await self._store.note_returned(lease.account_id, lease.id, lease.used)
        return True
