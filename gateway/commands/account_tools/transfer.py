"""`hearth accounts export` and `import`: tenants/export.py with files, a progress bar and an audit log."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, BinaryIO, TextIO

from cyclopts import Parameter

from gateway.commands.access.store_access import Access, StoreAccess
from gateway.commands.terminal.options import Json
from gateway.commands.terminal.output import print_either, progress_bar
from tenants import export as transfer
from tenants.audit import SYSTEM
from tenants.export import ImportCounts
from tenants.records.accounts import Account


async def export_accounts(
    *accounts: Annotated[str, Parameter(help="names or ids (default: all accounts, and all plans)")],
    usage: Annotated[bool, Parameter(help="with the ledger's records")] = False,
    audit: Annotated[bool, Parameter(help="with the audit logs")] = False,
    json: Annotated[bool, Parameter(show=False)] = False,
    access: Access,
) -> None:
    """Write accounts, their tokens and plans as JSON lines; never a token's secret."""
    chosen = {account.id: account for account in [await access.find(reference) for reference in accounts]}
    listed = list(chosen.values()) or await access.accounts.list()
    await write_export(access, listed, sys.stdout, whole=not accounts, usage=usage, audit=audit)
    sys.stdout.flush()
    print(
        "the file has seals of tokens, no secrets; it can be imported under this server's secret alone", file=sys.stderr
    )


async def write_export(
    access: StoreAccess, accounts: Sequence[Account], to: TextIO, *, whole: bool, usage: bool, audit: bool
) -> None:
    """See tenants.export."""
    now_s = int(time.time())
    lines = transfer.export(access.store, access.secret, accounts, now_s, whole=whole, usage=usage, audit=audit)
    with progress_bar(unit=" lines") as bar:
        async for line in lines:
            to.write(line.decode())
            bar.update()


async def import_file(
    file: Annotated[str, Parameter(help="of `hearth accounts export`, by a server with the same secret")],
    /,
    *,
    dry_run: Annotated[bool, Parameter(help="say what would be added, and change nothing")] = False,
    json: Json = False,
    new_access: Access,
) -> None:
    """Add what an export has and this store has not."""
    with open(file, "rb") as opened:  # noqa: ASYNC230 nothing else runs on this loop
        imported = await import_export_file(new_access, opened, dry_run)
    counts = ", ".join(f"{count:,} {name}" for name, count in _counts(imported).items())
    text = f"{'would add' if dry_run else 'added'} {counts}"
    text = "all of it is there already" if imported.nothing else text
    print_either(json, {"dry_run": dry_run, **asdict(imported)}, lambda: print(text))


async def import_export_file(access: StoreAccess, file: BinaryIO, dry_run: bool) -> ImportCounts:
    """The whole file is checked before anything of it is added. Raises ValueError."""
    bytes_read = os.fstat(file.fileno()).st_size * (2 if dry_run else 3)
    with progress_bar(total=bytes_read, unit="B", unit_scale=True) as bar:
        counts = await transfer.inspect_export(file, access.store, access.secret, bar.update)
        if dry_run:
            return counts
        imported = await transfer.import_accounts(file, access.store, bar.update)
    for account_id in imported.accounts:
        await access.note(account_id, "account.import", account_id)
    if not imported.nothing:
        await access.note(SYSTEM, "import", os.path.basename(file.name), **_counts(imported))
    return imported


def _counts(imported: ImportCounts) -> dict[str, int]:
    return {**asdict(imported), "accounts": len(imported.accounts)}
