"""`hearth accounts`: tenants, what each may use and how it is served."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter
from msgspec import UNSET, structs

from gateway.commands.access.store_access import Access, StoreAccess
from gateway.commands.account_tools import deletion, transfer
from gateway.commands.account_tools.documents import account_json
from gateway.commands.terminal.limits import NO_CHANGE, LimitOptions, limits_rows, limits_text
from gateway.commands.terminal.options import (
    AccountRef,
    Json,
    OptionalDuration,
    OptionalText,
    WordList,
    command_app,
    given_fields,
    parsed_by,
    split_list,
)
from gateway.commands.terminal.output import print_either, print_table, time_text
from gateway.declared_problems import convert_declared
from tenants.auth.accounts import ACCOUNT_ID, checked_account_name
from tenants.records.accounts import DEFAULT_PLAN, Account, Settings
from tenants.records.limits import NO_LIMITS

_TEACHING: Final = """\
examples:
  hearth accounts create acme                          an account and its first token, shown this once
  hearth accounts create acme --plan team --json       the same as JSON: account_id, token, ...
  hearth accounts list
  hearth accounts show acme                            plan, limits, settings, whether it is suspended
  hearth accounts limits acme                          what it may use, and who said so
  hearth accounts limits acme --requests-per-minute 60 --neurons-per-day 10000
  hearth accounts limits acme --neurons-per-day none                what its plan says again
  hearth accounts limits acme --class large --concurrent-requests 2     of the models of one class alone
  hearth accounts plan acme team
  hearth accounts suspend acme                         refused within a second; what runs ends within five
  hearth accounts resume acme
  hearth accounts rename acme 'Acme Ltd'                its id, tokens and usage stay
  hearth accounts delete acme --export acme.jsonl      suspended now, removed in 7 days
  hearth accounts restore acme                         until then
  hearth accounts settings acme --zero-retention yes --cache-keep 5m
  hearth accounts settings acme --regions eu-west,eu-north --notices-url https://acme.example/hearth
  hearth accounts purge-cache acme                     no prefix cached until now is found any more
  hearth accounts export > all.jsonl                   accounts, tokens' seals and plans; never a token's secret
  hearth accounts export --usage --audit acme > one.jsonl
  hearth accounts import all.jsonl --dry-run           looks at the whole file, changes nothing

An account is named by its name or its 32 hex digits. Names are compared without case, and no two accounts get the
same. The command writes to the store itself: a running server sees the change at once, and none needs to run. All
changes are in the audit log (`hearth audit list acme`).
"""
app = command_app("accounts", "accounts: their limits, plans, settings; export and import", _TEACHING)
app.command(transfer.export_accounts, name="export")
app.command(transfer.import_file, name="import")
app.command(deletion.delete_account, name="delete")
app.command(deletion.restore_account, name="restore")


def _parse_thresholds(text: str) -> list[float]:
    try:
        return [float(part) for part in split_list(text)]
    except ValueError:
        raise ValueError(f"{text!r} are no parts of a limit: write them like 0.8,1.0") from None


@Parameter(name="*")
@dataclass(frozen=True)
class SettingsOptions:
    """The settings that a command line changes."""

    zero_retention: Annotated[Literal["yes", "no"] | None, Parameter(help="nothing outlives its request")] = None
    cache_scope: Annotated[
        Literal["tenant", "user", "request"] | None, Parameter(help="who shares cached prefixes")
    ] = None
    cache_keep_s: Annotated[
        OptionalDuration, Parameter(name="--cache-keep", metavar="5m", help="after the last use, or none")
    ] = UNSET
    sharing: Annotated[WordList, Parameter(help="accounts that share cached prefixes, or none")] = UNSET
    regions: Annotated[WordList, Parameter(help="where its calls may be served, or none: anywhere")] = UNSET
    notices_url: Annotated[OptionalText, Parameter(metavar="URL", help="told of neurons that are used, or none")] = (
        UNSET
    )
    notices_at: Annotated[
        list[float] | None, parsed_by(_parse_thresholds, "0.8,1.0"), Parameter(help="the parts of a limit to be told")
    ] = None

    async def with_ids(self, access: StoreAccess) -> "SettingsOptions":
        """The same with ids in place of the names of accounts. Raises NotFound, AmbiguousName."""
        if not self.sharing:
            return self
        members = [each if ACCOUNT_ID.fullmatch(each) else (await access.find(each)).id for each in self.sharing]
        return replace(self, sharing=tuple(members))

    def changed(self, settings: Settings) -> Settings:
        """`settings` with what was given. Raises ValueError in words for people."""
        document: dict[str, Any] = msgspec.to_builtins(settings)
        document |= given_fields(self, ("cache_keep_s", "sharing", "regions"))
        if self.cache_scope is not None:
            document["cache_scope"] = self.cache_scope
        if self.zero_retention is not None:
            document["zero_retention"] = self.zero_retention == "yes"
        if self.notices_url is None:
            document["notices"] = None
        else:
            notices = {"url": self.notices_url or None, "at": self.notices_at}
            if changes := {name: value for name, value in notices.items() if value}:
                document["notices"] = {**(document["notices"] or {}), **changes}
        return convert_declared(document, Settings)


@app.command
async def create(
    name: Annotated[str, Parameter(help="its own among all accounts, however it is written")],
    /,
    *,
    plan: Annotated[str, Parameter(help=f"default: {DEFAULT_PLAN.name}")] = DEFAULT_PLAN.name,
    limits: LimitOptions = NO_CHANGE,
    json: Json = False,
    new_access: Access,
) -> None:
    """A new account and its first token."""
    account, token = await new_access.open_account(name, limits.changed(NO_LIMITS), plan)
    text = f"account  {account.id}\ntoken    {token}\n\nThe token is shown this once: keep it."
    print_either(json, {**account_json(account), "token": token}, lambda: print(text))


@app.command(name="list")
async def list_accounts(*, json: Json = False, access: Access) -> None:
    """All accounts, oldest first."""
    accounts = await access.accounts.list()
    rows = [
        (account.id, account.name, account.plan.name, _state(account), limits_text(account.limits))
        for account in accounts
    ]
    documents = [account_json(account) for account in accounts]
    print_either(json, documents, lambda: print_table(("ACCOUNT", "NAME", "PLAN", "STATE", "LIMITS"), rows))


@app.command
async def show(account: AccountRef, /, *, json: Json = False, access: Access) -> None:
    """All about one account."""
    latest = await access.find(account)
    print_either(json, account_json(latest), lambda: _print_whole(latest))


@app.command(name="limits")
async def change_limits(
    account: AccountRef, /, *, limits: LimitOptions = NO_CHANGE, json: Json = False, access: Access
) -> None:
    """Show an account's limits, or change those that are given."""
    latest = await access.find(account)
    if limits.changed(latest.ceiling) != latest.ceiling:
        latest = await access.accounts.update(
            latest.id, lambda before: structs.replace(before, ceiling=limits.changed(before.ceiling))
        )
        await access.note(latest.id, "account.change", latest.id, ceiling=latest.ceiling)
    print_either(json, account_json(latest), lambda: _print_limits(latest))


@app.command
async def plan(
    account: AccountRef, plan: Annotated[str, Parameter(help="its name")], /, *, json: Json = False, access: Access
) -> None:
    """Give an account another plan."""
    new_plan = await access.accounts.plan(plan)
    latest = await access.find(account)
    changed = await access.accounts.update(latest.id, lambda latest: structs.replace(latest, plan=new_plan))
    await access.note(changed.id, "account.change", changed.id, plan=new_plan.name)
    print_either(json, account_json(changed), lambda: _print_limits(changed))


@app.command
async def rename(
    account: AccountRef, name: Annotated[str, Parameter(help="that no other has")], /, *, json: Json = False,
    access: Access,
) -> None:  # fmt: skip
    """Give an account another name; its id, tokens and usage stay."""
    before, name = await access.find(account), checked_account_name(name)
    after = before
    if name != before.name:
        after = await access.accounts.update(before.id, lambda latest: structs.replace(latest, name=name))
        await access.note(after.id, "account.change", after.id, name=name, name_before=before.name)
    print_either(json, account_json(after), lambda: print(f"{after.id} is {after.name}"))


@app.command
async def suspend(account: AccountRef, /, *, json: Json = False, access: Access) -> None:
    """Refuse an account's calls until it is resumed."""
    after = await access.accounts.suspend((await access.find(account)).id)
    await access.note(after.id, "account.suspend", after.id)
    print_either(json, account_json(after), lambda: print(f"{after.name} ({after.id}) is suspended"))


@app.command
async def resume(account: AccountRef, /, *, json: Json = False, access: Access) -> None:
    """Serve a suspended account again."""
    after = await access.accounts.resume((await access.find(account)).id)
    await access.note(after.id, "account.resume", after.id)
    print_either(json, account_json(after), lambda: print(f"{after.name} ({after.id}) is served again"))


@app.command
async def purge_cache(account: AccountRef, /, *, json: Json = False, access: Access) -> None:
    """Make all that is cached for an account unfindable."""
    after = await access.accounts.purge_cache((await access.find(account)).id)
    await access.note(after.id, "account.purge_cache", after.id, epoch=after.epoch)
    print_either(json, account_json(after), lambda: print(f"nothing cached for {after.name} is found any more"))


@app.command(name="settings")
async def change_settings(
    account: AccountRef, /, *, settings: SettingsOptions = SettingsOptions(), json: Json = False, access: Access
) -> None:
    """Show an account's settings, or change those that are given."""
    latest = await access.find(account)
    settings = await settings.with_ids(access)
    new_settings = settings.changed(latest.settings)
    if new_settings.sharing and latest.id not in new_settings.sharing:
        raise ValueError("--sharing names all accounts of the group, this one among them")
    if new_settings != latest.settings:
        latest = await access.accounts.update(
            latest.id, lambda before: structs.replace(before, settings=settings.changed(before.settings))
        )
        await access.note(latest.id, "account.settings", latest.id, settings=latest.settings)
    print_either(json, account_json(latest), lambda: _print_settings(latest))


def _print_whole(account: Account) -> None:
    print(f"account     {account.id}\nname        {account.name}\nstate       {_state(account)}")
    print(f"created     {time_text(account.created_at)}")
    print(f"plan        {account.plan.name}\nrevision    {account.revision}\n")
    _print_limits(account)
    print()
    _print_settings(account)


def _print_limits(account: Account) -> None:
    rows = limits_rows(account.limits, account.plan.limits, account.ceiling, account.own)
    print_table(("LIMIT", "HOLDS", f"PLAN {account.plan.name}", "OPERATOR", "ITS OWN"), rows)


def _print_settings(account: Account) -> None:
    values: dict[str, Any] = msgspec.to_builtins(account.settings)
    notices = values.pop("notices") or {"url": None, "at": ()}
    values |= {"notices_url": notices["url"], "notices_at": notices["at"]}
    print_table(("SETTING", "VALUE"), [(name, _text(value)) for name, value in values.items()])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _state(account: Account) -> str:
    if account.deletion is not None:
        return f"suspended, removed on {time_text(account.deletion.due_at)}"
    if account.home:
        return f"copy of an account of the cell {account.home}"
    return "active" if account.suspended_at is None else f"suspended since {time_text(account.suspended_at)}"
