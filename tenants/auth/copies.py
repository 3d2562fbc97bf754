"""Copies of accounts and tokens whose home is another cell, for calls that come here. It knows no network.

A copy is made when a credential is seen for the first time, which its home verifies. While it is used, home is asked
twice a second what has changed; one that home has not confirmed for COPY_S opens nothing. So a revocation or suspension
at home holds here as soon as it is heard, and in a cell that is cut off after a minute at most.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from msgspec import structs

from tenants.auth.errors import UnknownToken
from tenants.records.accounts import DEFAULT_PLAN, Account
from tenants.records.grants import BEYOND_ACCOUNT
from tenants.records.limits import overlay
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.store.protocol import NameTaken, Store, StoreUnavailable

COPY_S: Final = 60.0
REFRESH_S: Final = 0.5
USED_S: Final = 120.0  # after its last use a copy is not asked about any more
REFRESH_MAX: Final = 500  # copies of one question
COPIES_MAX: Final = 10_000  # that are kept fresh at once
WRITES_MAX: Final = 10

log = logging.getLogger(__name__)


class AccountCopy(msgspec.Struct, frozen=True):
    """An account and one of its tokens as their home has them. `proof` names the token's secret there."""

    account: Account
    token: ApiToken
    proof: bytes


class KnownCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy as a cell has it: `seen` is what `stamp` said of it."""

    token_id: str
    proof: bytes
    seen: bytes


class OtherCells(Protocol):
    """The other cells. Raises HomeUnavailable."""

    def home_of(self, token_id: str) -> str | None:
        """The cell that has minted a token, None: this one, or nobody knows."""

    async def look_up(self, cell: str, credential: str) -> AccountCopy:
        """Raises UnknownToken, AccountSuspended."""

    async def refresh(self, cell: str, known: Sequence[KnownCopy]) -> Sequence[AccountCopy | bool]:
        """What each is by now: a copy, True for unchanged, False where it opens nothing any more."""


@dataclass(slots=True)
class _Tracked:
    cell: str
    digest: bytes
    known: KnownCopy
    confirmed_s: float
    used_s: float


class AccountCopies:
    """The copies of one gateway. `clock` is monotonic seconds; `digest` is a credential's as this cell keeps it."""

    def __init__(
        self,
        store: Store,
        cells: OtherCells,
        digest: Callable[[str], TokenDigest],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._cells = cells
        self._digest = digest
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}

    async def confirm(self, credential: str, token_id: str, home: str) -> None:
        """Sees to it that the store has what the home of a token says of it now. `home` is that of the copy that there
        is. Raises UnknownToken, AccountSuspended, HomeUnavailable, StoreUnavailable."""
        cell = home or self._cells.home_of(token_id)
        if cell is None:
            return
        now_s, digest = self._clock(), self._digest(credential)
        tracked = self._tracked.get(token_id)
        if tracked is not None and tracked.digest == digest.digest and now_s - tracked.confirmed_s <= COPY_S:
            tracked.used_s = now_s
            return
        copy = await self._cells.look_up(cell, credential)
        await self._keep(cell, token_id, copy, digest)
        if len(self._tracked) >= COPIES_MAX:
            del self._tracked[next(iter(self._tracked))]
        known = KnownCopy(token_id, copy.proof, stamp(copy))
        self._tracked[token_id] = _Tracked(cell, digest.digest, known, now_s, now_s)

    async def _keep(self, cell: str, token_id: str, copy: AccountCopy, digest: TokenDigest) -> None:
        """Stores a copy with the rights that reach no further than its account: an operator is one at home alone.
        Raises UnknownToken for a token without others, and for what is not the cell's own to say."""
        token = copy.token
        if (token.id, token.account_id) != (token_id, copy.account.id):
            raise UnknownToken(f"the cell {cell} knows the credential of ApiToken {token_id} as another one's")
        rights = tuple(right for right in token.grant.permissions if right not in BEYOND_ACCOUNT)
        if not rights:
            raise UnknownToken(f"ApiToken {token_id} opens nothing outside its home, the cell {cell}")
        await self._keep_account(cell, copy.account)
        token = structs.replace(token, grant=structs.replace(token.grant, permissions=rights))
        if not await self._store.accounts.update_token(token, [digest]):
            await self._store.accounts.add_token(token, digest)

    async def _keep_account(self, cell: str, account: Account) -> None:
        plans = {plan.name: plan for plan in await self._store.accounts.plans()}
        plan = plans.get(account.plan.name, DEFAULT_PLAN)
        limits = overlay(account.plan.limits, account.ceiling)
        copied = structs.replace(account, plan=plan, ceiling=limits, home=cell, deletion=None)
        for _ in range(WRITES_MAX):
            before = await self._store.accounts.get(account.id)
            if before is None:
                # A tenant of this cell may have the same name: ids tell them apart.
                await self._store.accounts.add(structs.replace(copied, revision=1), shared_name=True)
                return
            if before.home != cell:
                raise UnknownToken(
                    f"the cell {cell} has an account {account.id}, and so has {before.home or 'this one'}"
                )
            if structs.replace(copied, revision=before.revision) == before:
                return
            try:
                if await self._store.accounts.update(structs.replace(copied, revision=before.revision + 1)):
                    return
            except NameTaken:
                copied = structs.replace(copied, name=before.name)
        raise StoreUnavailable(f"the copy of account {account.id} is being changed by others all the time")

    async def run(self) -> None:
        """Asks homes what has changed, until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            async with asyncio.TaskGroup() as tasks:
                for cell in {tracked.cell for tracked in self._tracked.values()}:
                    tasks.create_task(self._refresh_quietly(cell))

    async def _refresh_quietly(self, cell: str) -> None:
        try:
            await self.refresh(cell)
        except StoreUnavailable as problem:
            log.debug("copies_wait", extra={"fields": {"cell": cell, "for": str(problem)}})

    async def refresh(self, cell: str) -> None:
        """Asks one home about the copies that were used lately. Raises HomeUnavailable, StoreUnavailable."""
        now_s = self._clock()
        for token_id, tracked in list(self._tracked.items()):
            if now_s - tracked.used_s > USED_S:
                del self._tracked[token_id]
        mine = [tracked for tracked in self._tracked.values() if tracked.cell == cell]
        for first in range(0, len(mine), REFRESH_MAX):
            group = mine[first : first + REFRESH_MAX]
            answers = await self._cells.refresh(cell, [tracked.known for tracked in group])
            for tracked, answer in zip(group, answers, strict=True):
                await self._take(tracked, answer, now_s)

    async def _take(self, tracked: _Tracked, answer: AccountCopy | bool, asked_s: float) -> None:
        """A copy is confirmed for when home was asked, not for when it answered. One that cannot be kept ends: the
        next call that shows its credential hears why."""
        token_id = tracked.known.token_id
        if isinstance(answer, AccountCopy):
            try:
                await self._keep(tracked.cell, token_id, answer, TokenDigest(tracked.digest, self._digest("").pepper))
                tracked.known = structs.replace(tracked.known, seen=stamp(answer))
            except UnknownToken:
                answer = False
        if answer is False:
            self._tracked.pop(token_id, None)
        else:
            tracked.confirmed_s = asked_s


def stamp(copy: AccountCopy) -> bytes:
    """A digest of all that a copy says."""
    return hashlib.blake2b(msgspec.msgpack.encode(copy), digest_size=16).digest()
