"""Accounts, ApiTokens, JWTs and the scope that separates prefix caches. It knows no prices and no HTTP.

Only the HMAC of an ApiToken's text under the server's secret is kept.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from msgspec import structs

from tenants.auth.api_token import ID_LENGTH, TOKEN_ID, base62, cell_code, holds_token, parse_token, token_text
from tenants.auth.caller import Caller
from tenants.auth.copies import AccountCopies, OtherCells
from tenants.auth.epoch_watch import EpochWatch
from tenants.auth.errors import AccountSuspended, AmbiguousName, Conflict, NameInUse, NotFound, UnknownToken
from tenants.auth.issuers import JwtVerifier, is_jwt_id
from tenants.auth.jwt import InvalidJwt, is_jwt
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan, name_key
from tenants.records.grants import Grant
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.store.protocol import Clock, NameTaken, Store, StoreUnavailable

PEPPER: Final = 1  # the version of the pepper that seals new tokens
TRUSTED_S: Final = 0.5  # how long a verified token is believed; revocation must be seen within 1 s
VERIFIED_MAX: Final = 10_000  # verified tokens kept in memory, and
KEPT_S: Final = 300.0  # for so long after they were verified last: one that ended stays so while the store is away
NAME_MAX: Final = 100
ACCOUNT_ID: Final = re.compile(r"[0-9a-f]{32}")
AMENDS_MAX: Final = 10  # tries of one change beside concurrent ones
PLANS_MAX: Final = 50
SECRET_BYTES_MIN: Final = 32


class KnownName(NamedTuple):
    """What an account, or a token of an account, is called."""

    name: str
    account_id: str


@dataclass(frozen=True, slots=True)
class _Verified:
    caller: Caller
    token: ApiToken
    until: int | None  # of a secret that was rolled
    at: float


class AccountService:
    """Accounts and ApiTokens in one store. `secret` is the server's, 32 bytes or more; another opens no old token.
    Without `issuers` a JWT is no credential. `cell` is this cell's name, and `others` are the cells beside it."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        clock: Clock = time.time,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
        issuers: JwtVerifier | None = None,
        cell: str = "",
        others: OtherCells | None = None,
    ) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the server's secret has {len(secret)} bytes; it needs {SECRET_BYTES_MIN} random ones")
        self._store = store
        self._pepper = hmac.digest(secret, b"hearth ApiToken", "sha256")
        self._scope_key = hmac.digest(secret, b"hearth scope", "sha256")
        self._clock = clock
        self._entropy = entropy
        self._issuers = issuers
        self._cell_code = cell_code(cell)
        self.copies = None if others is None else AccountCopies(store, others, self.digest)
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()
        self.epochs = EpochWatch(store)

    async def verify(self, credential: str) -> Caller:
        """Raises MalformedToken, UnknownToken, AccountSuspended or StoreUnavailable. A revocation, suspension or change
        anywhere holds here within 1 s.

        Costs one hash for a token seen in the last half second, one look-up else.
        """
        key = hashlib.sha256(credential.encode()).digest()
        seen, now = self._verified.get(key), self._clock()
        if seen is None or not 0 <= now - seen.at < TRUSTED_S:
            if self._issuers is not None and is_jwt(credential):
                seen = await self._look_up_jwt(self._issuers, credential)
            else:
                seen = await self._look_up(credential, seen)
            self._remember(key, seen)
        if seen.until is not None and now >= seen.until:
            raise UnknownToken(f"this secret of ApiToken {seen.token.id} was rolled")
        _require_live(seen.token, seen.caller.account, now)
        return seen.caller

    async def caller_of(
        self, account_id: str, token_id: str, grant: Grant | None = None, expires_at: int | None = None,
        key_id: str = "",
    ) -> Caller:  # fmt: skip
        """The caller of work that was accepted earlier and runs now. A JWT, which is in no store, has what Caller says
        of it as it was then. Raises UnknownToken where the account is gone, or the credential was revoked, has expired,
        or lost its key since; AccountSuspended; IssuerUnavailable and StoreUnavailable."""
        if is_jwt_id(token_id):
            if key_id and self._issuers is not None:
                try:
                    await self._issuers.check_key(token_id, key_id)
                except InvalidJwt as refused:
                    raise UnknownToken(f"the JWT is refused: {refused}") from None
            account = await self._store.accounts.get(account_id)
            if account is None:
                raise UnknownToken(f"there is no account {account_id}")
            token = ApiToken(token_id, account_id, token_id, 0, expires_at, grant=grant or Grant())
        else:
            row = await self._store.accounts.token(token_id)
            if row is None or row[0].account_id != account_id:
                raise UnknownToken(f"no ApiToken {token_id} in account {account_id}")
            token, _, account = row
        _require_live(token, account, self._clock())
        return await self._caller(account, token)

    async def _look_up(self, credential: str, seen: _Verified | None) -> _Verified:
        token_id, asked_at = parse_token(credential), self._clock()
        try:
            row = await self._store.accounts.token(token_id)
            if self.copies is not None and (row is None or row[2].home):
                await self.copies.confirm(credential, token_id, row[2].home if row else "")
                row = await self._store.accounts.token(token_id)
        except StoreUnavailable:
            if seen is not None and _has_ended(seen.token, asked_at):
                return seen  # a revocation or an expiry that was seen stays in force while the store is away
            raise
        if row is None:
            raise UnknownToken(f"no ApiToken {token_id}")
        token, digests, account = row
        digest = self.digest(credential).digest
        for secret in digests:
            if hmac.compare_digest(digest, secret.digest) and secret.pepper == PEPPER:
                return _Verified(await self._caller(account, token), token, secret.until, asked_at)
        raise UnknownToken(f"ApiToken {token_id} has another secret")

    async def _look_up_jwt(self, issuers: JwtVerifier, credential: str) -> _Verified:
        try:
            proven = await issuers.verify(credential)
        except InvalidJwt as refused:
            raise UnknownToken(f"the JWT is refused: {refused}") from None
        token, asked_at = proven.token, self._clock()
        account = await self._store.accounts.get(token.account_id)
        if account is None:
            raise UnknownToken(f"the JWT is refused: there is no account {token.account_id}")
        if account.home:
            raise UnknownToken(
                f"the JWT is refused: the account is kept in the cell {account.home}, which takes its JWTs"
            )
        caller = replace(await self._caller(account, token), key_id=proven.kid)
        return _Verified(caller, token, None, asked_at)

    async def _caller(self, account: Account, token: ApiToken) -> Caller:
        (scope, epoch), own = await self._shared_scope(account), self.scope(account.id)
        self.epochs.saw(account, {scope: epoch, own: epoch})
        terms = token.expires_at, account.limits, token.limits
        return Caller(account, token.id, token.grant, *terms, scope, epoch, own)

    async def _shared_scope(self, account: Account) -> tuple[bytes, int]:
        """The scope and epoch of its sharing group once all members name the very same accounts, else its own. A
        group's epoch is the sum of its members': each of them raises it for all."""
        members, epoch = frozenset(account.settings.sharing), account.epoch
        if account.id not in members or len(members) < 2:
            return self.scope(account.id), account.epoch
        for member in members - {account.id}:
            other = await self._store.accounts.get(member)
            if other is None or frozenset(other.settings.sharing) != members:
                return self.scope(account.id), account.epoch
            epoch += other.epoch
        return self.scope(" ".join(sorted(members))), epoch

    def _remember(self, key: bytes, verified: _Verified) -> None:
        self._verified[key] = verified
        self._verified.move_to_end(key)
        oldest = verified.at - KEPT_S
        while len(self._verified) > VERIFIED_MAX or next(iter(self._verified.values())).at < oldest:
            self._verified.popitem(last=False)

    async def create(self, name: str, ceiling: Limits | None = None, plan: str = DEFAULT_PLAN.name) -> Account:
        """A new account. Raises NotFound where there is no such plan, NameInUse, and ValueError for a bad name."""
        account = Account(
            id=self._entropy(16).hex(),
            name=checked_account_name(name),
            ceiling=ceiling or NO_LIMITS,
            created_at=int(self._clock()),
            plan=await self.plan(plan),
        )
        try:
            await self._store.accounts.add(account)
        except NameTaken:
            if own := [each.id for each in await self._store.accounts.named(account.name) if not each.home]:
                raise NameInUse(account.name, own[0]) from None
            await self._store.accounts.add(account, shared_name=True)  # what has it are copies of other cells' accounts
        return account

    async def get(self, account_id: str) -> Account:
        account = await self._store.accounts.get(account_id)
        if account is None:
            raise NotFound(f"no account {account_id!r}; `hearth accounts list` shows them")
        return account

    async def find(self, reference: str) -> Account:
        """The account of this id, or else of this name, as `name_key` compares them: this cell's own before copies of
        other cells', which may have any name. Raises NotFound, AmbiguousName."""
        account = await self._store.accounts.get(reference) if ACCOUNT_ID.fullmatch(reference) else None
        accounts = [account] if account is not None else await self._store.accounts.named(reference)
        accounts = [each for each in accounts if not each.home] or accounts
        if not accounts:
            raise NotFound(f"no account has the id or name {reference!r}; `hearth accounts list` shows them")
        if len(accounts) > 1:
            ids = ", ".join(account.id for account in accounts)
            raise AmbiguousName(f"{len(accounts)} accounts have the name {reference!r}; say which by its id: {ids}")
        return accounts[0]

    async def update(
        self, account_id: str, change: Callable[[Account], Account], revision: int | None = None
    ) -> Account:
        """Stores what `change` makes of the account; it is in force on every gateway within 1 s.

        With a revision, only an account that still has it is changed; without one `change` may be called again, on what
        others made of the account meanwhile. Raises NotFound, Conflict, NameInUse, and what `change` raises.
        """
        for _ in range(AMENDS_MAX):
            account = await self.get(account_id)
            if revision is not None and account.revision != revision:
                raise Conflict(f"the account has revision {account.revision} by now, not {revision}: read it again")
            _require_home(account, "change it there")
            changed = structs.replace(change(account), revision=account.revision + 1)
            if changed.settings.zero_retention and not account.settings.zero_retention:
                changed = structs.replace(changed, epoch=changed.epoch + 1)  # what was cached before must go too
            try:
                stored = await self._store.accounts.update(changed)
            except NameTaken as taken:
                raise NameInUse(changed.name, taken.account_id) from None
            if stored:
                if changed.settings.zero_retention:
                    await self._store.batches.discard(account_id)
                return changed
        raise Conflict("the account is being changed by others all the time; try again")

    async def suspend(self, account_id: str) -> Account:
        """Refuses its calls on every gateway within 1 s; running ones end within 5 s."""
        now = int(self._clock())
        return await self.update(
            account_id, lambda account: structs.replace(account, suspended_at=account.suspended_at or now)
        )

    async def resume(self, account_id: str) -> Account:
        """Serves it again. Raises Conflict where it is to be removed."""

        def resumed(account: Account) -> Account:
            if account.deletion is not None:
                raise Conflict(f"account {account.id} is to be removed: `hearth accounts restore` takes that back")
            return structs.replace(account, suspended_at=None)

        return await self.update(account_id, resumed)

    async def purge_cache(self, account_id: str) -> Account:
        """Hides all prefixes that were cached for it until now from requests that begin a second from now."""
        account = await self.update(account_id, lambda account: structs.replace(account, epoch=account.epoch + 1))
        self.epochs.saw(account, {self.scope(account_id): account.epoch})
        return account

    async def plans(self) -> Sequence[Plan]:
        """All plans that an account may have, by name."""
        stored = {plan.name: plan for plan in await self._store.accounts.plans()}
        return sorted({DEFAULT_PLAN.name: DEFAULT_PLAN, **stored}.values(), key=lambda plan: plan.name)

    async def plan(self, name: str) -> Plan:
        for plan in await self.plans():
            if plan.name == name:
                return plan
        raise NotFound(f"no plan {name!r}; `hearth plans list` shows them")

    async def put_plan(self, plan: Plan, revision: int | None = None) -> Plan:
        """Creates or replaces a plan; it is in force for its accounts on every gateway within 1 s.

        `revision` is the one that it is based on, 0 where there must be none yet. Raises Conflict, and ValueError for
        more plans than PLANS_MAX.
        """
        for _ in range(AMENDS_MAX):
            revisions = {stored.name: stored.revision for stored in await self._store.accounts.plans()}
            before = revisions.get(plan.name, 0)
            if revision is not None and revision != before:
                raise Conflict(f"plan {plan.name} has revision {before} by now, not {revision}: read it again")
            if not before and len(revisions) >= PLANS_MAX:
                raise ValueError(f"there are {len(revisions)} plans, and the most is {PLANS_MAX}")
            changed = structs.replace(plan, revision=before + 1)
            if await self._store.accounts.put_plan(changed):
                return changed
        raise Conflict("the plan is being changed by others all the time; try again")

    async def remove_plan(self, name: str) -> None:
        """Removes a plan; the default one gets its first content again. Raises NotFound, and Conflict while in use."""
        users = [account for account in await self._store.accounts.list() if account.plan.name == name]
        if users and name != DEFAULT_PLAN.name:
            others = f" and {len(users) - 1:,} more" if len(users) > 1 else ""
            found = f"{users[0].name} ({users[0].id}){others}"
            raise Conflict(f"accounts have the plan {name}: {found}; give them another first")
        if not await self._store.accounts.remove_plan(name):
            if name == DEFAULT_PLAN.name:
                raise Conflict(f"the plan {name} is always there, and has its first content already")
            raise NotFound(f"no plan {name!r} to remove; `hearth plans list` shows them")

    async def mint(
        self,
        account_id: str,
        name: str,
        expires_at: float | None = None,
        grant: Grant | None = None,
        limits: Limits = NO_LIMITS,
    ) -> tuple[ApiToken, str]:
        """A new ApiToken and its text, shown this once and kept nowhere. `expires_at` is seconds since 1970."""
        account = await self._store.accounts.get(account_id)
        if account is not None:
            _require_home(account, "make its tokens there")
        length = ID_LENGTH - len(self._cell_code)
        token_id = self._cell_code + base62(int.from_bytes(self._entropy(8), "big") % 62**length, length)
        text = token_text(token_id, self._entropy)
        times = (int(self._clock()), None if expires_at is None else int(expires_at))
        token = ApiToken(token_id, account_id, checked_name(name), *times, grant=grant or Grant(), limits=limits)
        if not await self._store.accounts.add_token(token, self.digest(text)):
            raise NotFound(f"no account {account_id!r}; `hearth accounts list` shows them")
        return token, text

    async def roll(self, token_id: str, grace_s: float = 0.0) -> tuple[ApiToken, str]:
        """A new secret for a token, and its text, shown this once. The secret before it opens for `grace_s` seconds
        more, on every gateway; older ones do not. Raises NotFound, also where the token was revoked."""
        token, digests = await self._live_token(token_id)
        text = token_text(token_id, self._entropy)
        now = int(self._clock())
        before = [structs.replace(digests[0], until=now + int(grace_s))] if grace_s > 0 else []
        await self._store.accounts.update_token(token, [self.digest(text), *before])
        return token, text

    async def update_token(
        self, token_id: str, name: str, expires_at: float | None, grant: Grant, limits: Limits = NO_LIMITS
    ) -> ApiToken:
        """Replaces a token's name, expiry, grant and limits on every gateway within 1 s. Raises NotFound."""
        token, digests = await self._live_token(token_id)
        expiry = None if expires_at is None else int(expires_at)
        changed = structs.replace(token, name=checked_name(name), expires_at=expiry, grant=grant, limits=limits)
        await self._store.accounts.update_token(changed, digests)
        return changed

    async def token(self, token_id: str) -> ApiToken:
        """Raises NotFound."""
        row = await self._store.accounts.token(token_id)
        if row is None:
            raise NotFound(f"no token has the id {token_id!r}; `hearth tokens list ACCOUNT` shows them")
        return row[0]

    async def names(self, ids: Collection[str]) -> dict[str, KnownName]:
        """What accounts and ApiTokens of these ids are called now, but for ids of neither and of what is gone."""
        found = await asyncio.gather(*map(self._name, ids))
        return {each: name for each, name in zip(ids, found, strict=True) if name is not None}

    async def _name(self, id: str) -> KnownName | None:
        if ACCOUNT_ID.fullmatch(id):
            account = await self._store.accounts.get(id)
            return None if account is None else KnownName(account.name, id)
        row = await self._store.accounts.token(id) if TOKEN_ID.fullmatch(id) else None
        return None if row is None else KnownName(row[0].name, row[0].account_id)

    async def _live_token(self, token_id: str) -> tuple[ApiToken, Sequence[TokenDigest]]:
        row = await self._store.accounts.token(token_id)
        if row is None or row[0].revoked_at is not None:
            raise NotFound(f"no token in force has the id {token_id!r}; `hearth tokens list ACCOUNT` shows them")
        _require_home(row[2], "change its tokens there")
        return row[0], row[1]

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        """All tokens of one account, revoked and expired ones too, oldest first."""
        await self.get(account_id)
        return await self._store.accounts.tokens(account_id)

    async def revoke(self, token_id: str) -> None:
        """Revokes a token for good, on every gateway within 1 s."""
        row = await self._store.accounts.token(token_id)
        if row is None:
            raise NotFound(f"no token has the id {token_id!r}; `hearth tokens list ACCOUNT` shows them")
        _require_home(row[2], "revoke its tokens there, which ends them everywhere")
        await self._store.accounts.revoke(token_id, int(self._clock()))

    async def list(self) -> Sequence[Account]:
        """All accounts, oldest first."""
        return await self._store.accounts.list()

    def scope(self, account_id: str) -> bytes:
        """16 bytes that separate this account's prefix caches from all others; they reveal nothing about it."""
        return hashlib.blake2b(account_id.encode(), digest_size=16, key=self._scope_key).digest()

    def digest(self, text: str) -> TokenDigest:
        """What the store keeps of a token's text."""
        return TokenDigest(hmac.digest(self._pepper, text.encode(), "sha256"), PEPPER)


def _require_live(token: ApiToken, account: Account, now: float) -> None:
    """Raises UnknownToken, AccountSuspended."""
    if _has_ended(token, now):
        raise UnknownToken(f"ApiToken {token.id} was revoked or has expired")
    if account.suspended_at is not None:
        raise AccountSuspended(f"account {account.id} is suspended")


def _require_home(account: Account, advice: str) -> None:
    """Raises Conflict for a copy of another cell's account."""
    if account.home:
        raise Conflict(f"account {account.id} is kept in the cell {account.home}: {advice}")


def _has_ended(token: ApiToken, now: float) -> bool:
    return token.revoked_at is not None or (token.expires_at is not None and now >= token.expires_at)


def checked_account_name(name: str) -> str:
    """The stripped name of an account, which may be no id. Raises ValueError."""
    name = checked_name(name)
    if ACCOUNT_ID.fullmatch(name_key(name)):
        raise ValueError(f"{name!r} looks like an account's id; an account's name is another text than 32 hex digits")
    return name


def checked_name(name: str) -> str:
    """The stripped name. Raises ValueError."""
    name = name.strip()
    if holds_token(name):  # first: no other refusal may repeat it
        raise ValueError("a name is shown and kept, and this one has a token in it; roll that where others saw it")
    if not name or len(name) > NAME_MAX or not name.isprintable():
        raise ValueError(f"a name is 1 to {NAME_MAX} printable characters, not {name!r}")
    return name
