"""`hearth accounts delete` and `restore`: tenants/deletion.py with a question, an export and the audit log."""

import os
import time
from typing import Annotated

from cyclopts import Parameter

from gateway.commands.access.store_access import Access, StoreAccess
from gateway.commands.account_tools.documents import account_json
from gateway.commands.account_tools.transfer import write_export
from gateway.commands.terminal.confirm import Yes, confirm
from gateway.commands.terminal.options import AccountRef, Duration, Json
from gateway.commands.terminal.output import print_either, time_text
from tenants import deletion
from tenants.auth.errors import Conflict
from tenants.records.accounts import Account


async def delete_account(
    account: AccountRef,
    /,
    *,
    grace: Annotated[Duration, Parameter(metavar="7d", help="for how long it can be restored")] = deletion.GRACE_S,
    drop_usage: Annotated[bool, Parameter(help="the ledger goes with it (else it stays its 400 days)")] = False,
    export: Annotated[str | None, Parameter(metavar="FILE", help="first write all of it there, to be imported")] = None,
    yes: Yes = False,
    json: Json = False,
    access: Access,
) -> None:
    """Suspend an account now, and remove it after a grace in which it can be restored."""
    latest = await access.find(account)
    if latest.deletion is not None:
        raise Conflict(f"{latest.name} is to be removed already, {_when(latest)}")
    saved = f"is exported to {export} first" if export else "is not exported first (--export FILE does)"
    usage = "its usage goes too" if drop_usage else "its usage stays for the bill"
    due = time_text(time.time() + grace)
    confirm(f"account {latest.name} ({latest.id}) is suspended now, removed on {due} UTC and {saved}; {usage}", yes)
    if export:
        await _export(access, latest, export)
    after = await deletion.delete(access.accounts, latest.id, time.time(), grace, keep_usage=not drop_usage)
    await access.note(after.id, "account.delete", after.id, grace_s=grace, keep_usage=not drop_usage)
    text = (
        f"{after.name} is suspended, and is removed {_when(after)}\nhearth accounts restore {after.id}   brings it back"
    )
    print_either(json, account_json(after), lambda: print(text))


async def restore_account(account: AccountRef, /, *, json: Json = False, access: Access) -> None:
    """Take a deletion back."""
    latest = await access.find(account)
    after = await deletion.restore(access.accounts, latest.id, time.time())
    await access.note(after.id, "account.restore", after.id)
    state = "served again" if after.suspended_at is None else "suspended, as it was before"
    print_either(json, account_json(after), lambda: print(f"{after.name} ({after.id}) stays, and is {state}"))


async def _export(access: StoreAccess, account: Account, path: str) -> None:
    """Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: ASYNC230 nothing else runs on this loop
        await write_export(access, [account], file, whole=False, usage=True, audit=True)


def _when(account: Account) -> str:
    assert account.deletion is not None
    return f"on {time_text(account.deletion.due_at)} UTC or soon after, by a gateway"
