"""What a store has to become to be as teams.yaml declares it: changes in words, and each as something to do.

All is checked and compared before the first change is made; a second run completes what was interrupted.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType, structs

from gateway.commands.access.reductions import reductions
from gateway.commands.access.store_access import StoreAccess
from gateway.commands.account_tools.teams_file import (
    DeclaredAccount,
    DeclaredTeams,
    DeclaredToken,
    InvalidTeams,
    expiry_of,
)
from gateway.commands.terminal.output import time_text
from tenants import deletion
from tenants.audit import SYSTEM
from tenants.auth.accounts import ACCOUNT_ID, PLANS_MAX
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan, name_key
from tenants.records.grants import Grant
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.tokens import ApiToken

NewSecret = Callable[[Account, ApiToken, str], None]


class Change(NamedTuple):
    """`text` is for people; `loses`: somebody may do less than before, or something ends for good."""

    text: str
    act: Callable[[], Awaitable[None]]
    loses: bool = False


@dataclass(slots=True)
class TeamsPlanner:
    """One comparison. `keep_secret` gets each new token's text, once."""

    access: StoreAccess
    teams: DeclaredTeams
    keep_secret: NewSecret
    grace_s: float
    plans: dict[str, Plan] = field(default_factory=dict)
    accounts: Sequence[Account] = ()
    matched: dict[str, Account | None] = field(default_factory=dict)  # by the name in the file; None: a new one
    problems: list[str] = field(default_factory=list)
    new_tokens: int = 0

    async def changes(self, prune: bool) -> list[Change]:
        """All changes, in their order. Raises InvalidTeams for what cannot be."""
        self.plans = {plan.name: plan for plan in await self.access.accounts.plans()}
        # Copies of other cells' accounts are no part of it: they change and end at their homes.
        self.accounts = [account for account in await self.access.accounts.list() if not account.home]
        for name, declared in self.teams.accounts.items():
            self.matched[name] = self._match(name, declared)
        changes = [change for name, declared in self.teams.plans.items() if (change := self._plan(name, declared))]
        if len({*self.plans, *self.teams.plans} - {DEFAULT_PLAN.name}) > PLANS_MAX:
            self.problems.append(f"{self.teams.path}: there would be more than {PLANS_MAX} plans")
        for name, declared in self.teams.accounts.items():
            changes += await self._account(name, declared)
        for name, declared in self.teams.accounts.items():
            changes += self._sharing(name, declared)  # once all accounts are there
        for name, declared in self.teams.accounts.items():
            changes += await self._tokens(name, declared, prune)
        if prune:
            changes += self._prune()
        if self.problems:
            raise InvalidTeams(self.problems)
        return changes

    def _match(self, name: str, declared: DeclaredAccount) -> Account | None:
        """The stored account that the file means; None: there is none."""
        named = [account for account in self.accounts if name_key(account.name) == name_key(name)]
        where = self.teams.at("accounts", name, "id")
        if isinstance(declared.id, str):
            identified = next((account for account in self.accounts if account.id == declared.id), None)
            if identified is None:
                self.problems.append(f"{where}: there is no account {declared.id}; leave `id` out to make one")
            elif named and identified not in named:
                self.problems.append(f"{where}: account {named[0].id} has the name {name!r} already")
            named = [identified] if identified is not None else []
        if len(named) > 1:
            ids = ", ".join(account.id for account in named)
            self.problems.append(f"{where}: {len(named)} accounts have the name {name!r}; add `id`: one of {ids}")
        account = named[0] if named else None
        if account is not None and account.deletion is not None:
            self.problems.append(f"{where}: {name} is to be removed; `hearth accounts restore` takes that back first")
        return account

    def _plan(self, name: str, declared: Any) -> Change | None:
        before = self.plans.get(name)
        fields = {key: value for key, value in structs.asdict(declared).items() if value is not UNSET}
        try:
            after = structs.replace(before or Plan(name), **fields)
        except ValueError as error:
            self.problems.append(f"{self.teams.at('plans', name)}: plan {name}: {error}")
            return None
        if before is not None and after == before:
            return None

        async def act() -> None:
            stored = await self.access.accounts.put_plan(after, 0 if before is None else before.revision)
            await self.access.note(SYSTEM, "plan.change", stored.name, **structs.asdict(stored))

        used = any(account.plan.name == name for account in self.accounts)
        loses = before is not None and used and bool(reductions(before, after))
        return Change(f"plan {name}: {_difference(before, after, 'revision')}", act, loses)

    async def _account(self, name: str, declared: DeclaredAccount) -> list[Change]:
        before = self.matched[name]
        plan_name = declared.plan if isinstance(declared.plan, str) else None
        if plan_name is not None and plan_name not in {*self.plans, *self.teams.plans}:
            where = self.teams.at("accounts", name, "plan")
            self.problems.append(f"{where}: there is no plan {plan_name!r}, in the store or in this file")
        if before is None:
            return [self._new_account(name, declared)]
        after = before
        try:
            after = _declared(before, name, declared)
        except ValueError as error:
            self.problems.append(f"{self.teams.at('accounts', name, 'settings')}: {error}")
        after = structs.replace(after, plan=self._planned(plan_name) or before.plan)
        texts = [f"plan {before.plan.name} -> {plan_name}"] if after.plan.name != before.plan.name else []
        if after != structs.replace(before, plan=after.plan):
            texts.append(_difference(before, after, "revision", "plan", "suspended_at"))
        if (before.suspended_at is None) != (after.suspended_at is None):
            texts.append("served again" if after.suspended_at is None else "suspended")
        if not any(texts):
            return []

        async def act() -> None:
            plan = await self.access.accounts.plan(after.plan.name)
            await self.access.accounts.update(
                before.id, lambda latest: structs.replace(_declared(latest, name, declared), plan=plan)
            )
            await self.access.note(before.id, "account.apply", before.id, changes=texts)

        less = reductions(*(structs.replace(each.plan, limits=each.ceiling_limits) for each in (before, after)))
        loses = bool(less) or (before.suspended_at is None and after.suspended_at is not None)
        return [Change(f"account {name}: {'; '.join(filter(None, texts))}", act, loses)]

    def _planned(self, name: str | None) -> Plan | None:
        """The plan of this name as it will be."""
        if name is None or (name not in self.plans and name not in self.teams.plans):
            return None
        fields = structs.asdict(self.teams.plans[name]) if name in self.teams.plans else {}
        given = {key: value for key, value in fields.items() if value is not UNSET}
        try:
            return structs.replace(self.plans.get(name) or Plan(name), **given)
        except ValueError:
            return None  # told already

    def _new_account(self, name: str, declared: DeclaredAccount) -> Change:
        plan = declared.plan if isinstance(declared.plan, str) else DEFAULT_PLAN.name
        try:
            _declared(Account("0" * 32, name, NO_LIMITS, 0), name, declared)
        except ValueError as error:
            self.problems.append(f"{self.teams.at('accounts', name, 'settings')}: {error}")

        async def act() -> None:
            ceiling = declared.limits if isinstance(declared.limits, Limits) else NO_LIMITS
            account = await self.access.accounts.create(name, ceiling, plan)
            await self.access.note(account.id, "account.create", account.id, name=name, plan=plan, ceiling=ceiling)
            after = _declared(account, name, declared)
            if after != account:
                await self.access.accounts.update(account.id, lambda latest: _declared(latest, name, declared))

        return Change(f"account {name}: new, of plan {plan}", act)

    def _sharing(self, name: str, declared: DeclaredAccount) -> list[Change]:
        """Its group, whose members the file names by name or id."""
        wanted = UNSET if isinstance(declared.settings, UnsetType) else declared.settings.sharing
        if isinstance(wanted, UnsetType):
            return []
        where = self.teams.at("accounts", name, "settings", "sharing")
        ids, known = {account.id: account.id for account in self.accounts}, {name_key(each) for each in self.matched}
        ids |= {name_key(account.name): account.id for account in self.accounts}
        keys = [member if ACCOUNT_ID.fullmatch(member) else name_key(member) for member in wanted]
        self.problems += [
            f"{where}: there is no account {key!r}" for key in keys if key not in ids and key not in known
        ]
        if keys and name_key(name) not in keys and (self.matched[name] is None or self.matched[name].id not in keys):  # type: ignore[union-attr]
            self.problems.append(f"{where}: it names all accounts of the group, {name} among them")
        before = self.matched[name]
        if before is not None and [ids.get(key) for key in keys] == list(before.settings.sharing):
            return []

        async def act() -> None:
            members = tuple([(await self.access.find(member)).id for member in wanted])
            account = await self.access.find(name)
            changed = structs.replace(account.settings, sharing=members)
            await self.access.accounts.update(account.id, lambda latest: structs.replace(latest, settings=changed))
            await self.access.note(account.id, "account.settings", account.id, sharing=members)

        return [Change(f"account {name}: shares cached prefixes with {', '.join(wanted) or 'nobody'}", act)]

    async def _tokens(self, name: str, declared: DeclaredAccount, prune: bool) -> list[Change]:
        if isinstance(declared.tokens, UnsetType):
            return []
        account, changes = self.matched[name], []
        stored = [] if account is None else await self.access.accounts.tokens(account.id)
        live = [token for token in stored if token.revoked_at is None and not _expired(token)]
        for token_name, token in declared.tokens.items():
            alike = [each for each in live if each.name == token_name]
            if len(alike) > 1:
                ids = ", ".join(each.id for each in alike)
                where = self.teams.at("accounts", name, "tokens", token_name)
                self.problems.append(
                    f"{where}: {len(alike)} live tokens have this name: revoke or rename some of {ids}"
                )
            elif change := self._token(name, token_name, token, alike[0] if alike else None):
                changes.append(change)
        if prune:
            changes += [self._revocation(name, each) for each in live if each.name not in declared.tokens]
        return changes

    def _token(self, account: str, name: str, declared: DeclaredToken, before: ApiToken | None) -> Change | None:
        where = self.teams.at("accounts", account, "tokens", name)
        try:
            after = _declared_token(before or ApiToken("", "", name, 0), declared)
        except ValueError as error:
            self.problems.append(f"{where}: {error}")
            return None
        if before is None and _expired(after):
            self.problems.append(f"{where}: it would have expired already")
        if before is not None:
            return None if after == before else self._token_change(account, before, after)
        self.new_tokens += 1

        async def act() -> None:
            owner = await self.access.find(account)
            token, text = await self.access.accounts.mint(owner.id, name, after.expires_at, after.grant, after.limits)
            self.keep_secret(owner, token, text)
            await self.access.note(owner.id, "token.create", token.id, name=name, grant=after.grant)

        return Change(f"token {account}/{name}: new", act)

    def _token_change(self, account: str, before: ApiToken, after: ApiToken) -> Change:
        async def act() -> None:
            changed = (after.name, after.expires_at, after.grant, after.limits)
            await self.access.accounts.update_token(before.id, *changed)
            await self.access.note(before.account_id, "token.change", before.id, grant=after.grant)

        return Change(f"token {account}/{before.name}: {_difference(before, after)}", act)

    def _revocation(self, account: str, token: ApiToken) -> Change:
        async def act() -> None:
            await self.access.accounts.revoke(token.id)
            await self.access.note(token.account_id, "token.revoke", token.id)

        return Change(f"token {account}/{token.name} ({token.id}): revoked for good", act, loses=True)

    def _prune(self) -> list[Change]:
        """Ends what the file does not name: accounts, and then the plans that nobody has any more."""
        kept = {account.id for account in self.matched.values() if account is not None}
        gone = [account for account in self.accounts if account.id not in kept and account.deletion is None]
        leaving = {account.id for account in gone}
        needed = {account.plan.name for account in self.accounts if account.id not in leaving}
        needed |= {account.plan.name for account in gone}  # until the sweep removes them
        unused = [name for name in self.plans if name not in {*self.teams.plans, *needed, DEFAULT_PLAN.name}]
        return [self._removal(account) for account in gone] + [self._plan_removal(name) for name in unused]

    def _removal(self, account: Account) -> Change:
        async def act() -> None:
            await deletion.delete(self.access.accounts, account.id, time.time(), self.grace_s)
            await self.access.note(account.id, "account.delete", account.id, grace_s=self.grace_s, keep_usage=True)

        days = f"{self.grace_s / 86_400:g}"
        return Change(f"account {account.name} ({account.id}): suspended, removed in {days} days", act, loses=True)

    def _plan_removal(self, name: str) -> Change:
        async def act() -> None:
            await self.access.accounts.remove_plan(name)
            await self.access.note(SYSTEM, "plan.remove", name)

        return Change(f"plan {name}: removed", act, loses=True)


def _declared(account: Account, name: str, declared: DeclaredAccount) -> Account:
    """The account with what is declared of it, but for its plan and whom it shares with. Raises ValueError."""
    fields: dict[str, Any] = {"name": name}
    if isinstance(declared.limits, Limits):
        fields["ceiling"] = declared.limits
    if not isinstance(declared.settings, UnsetType):
        given = {key: value for key, value in structs.asdict(declared.settings).items() if value is not UNSET}
        given.pop("sharing", None)
        fields["settings"] = structs.replace(account.settings, **given)
    if declared.suspended is True:
        fields["suspended_at"] = account.suspended_at or int(time.time())
    elif declared.suspended is False:
        fields["suspended_at"] = None
    return structs.replace(account, **fields)


def _declared_token(token: ApiToken, declared: DeclaredToken) -> ApiToken:
    """The token with what is declared of it. Raises ValueError."""
    given = {name: getattr(declared, name) for name in ("permissions", "models", "networks")}
    grant: Grant = structs.replace(token.grant, **{name: value for name, value in given.items() if value is not UNSET})
    limits = declared.limits if isinstance(declared.limits, Limits) else token.limits
    expires_at = token.expires_at if isinstance(declared.expires, UnsetType) else expiry_of(declared)
    return structs.replace(token, grant=grant, limits=limits, expires_at=expires_at)


def _expired(token: ApiToken) -> bool:
    return token.expires_at is not None and token.expires_at <= time.time()


def _difference(before: msgspec.Struct | None, after: msgspec.Struct, *without: str) -> str:
    """`limits.burst 5 -> none` for each field that differs, by its name in the file."""
    if before is None:
        return "new"
    old, new = (_flat(each) for each in (before, after))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key) and key.split(".")[0] not in without]
    return ", ".join(f"{_name(key)} {_shown(key, old.get(key))} -> {_shown(key, new.get(key))}" for key in changed)


def _flat(value: msgspec.Struct | dict[str, Any], start: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, each in (value if isinstance(value, dict) else structs.asdict(value)).items():
        nested = isinstance(each, msgspec.Struct | dict)
        flat |= _flat(each, f"{start}{key}.") if nested else {f"{start}{key}": each}
    return flat


def _name(key: str) -> str:
    """What the file calls a field of an account or a token."""
    first, _, rest = key.partition(".")
    return {"ceiling": f"limits.{rest}", "grant": rest, "expires_at": "expires"}.get(first, key)


def _shown(key: str, value: Any) -> str:
    if key.endswith("_at") and value is not None:
        return f"{time_text(value)} UTC"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
