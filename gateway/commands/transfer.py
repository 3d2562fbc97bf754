"""`hearth accounts export` and `import`: tenants/export.py with files, a progress bar and an audit log."""

import argparse
import os
import sys
import time
from dataclasses import asdict
from typing import Any, BinaryIO

from tqdm import tqdm

from gateway.commands.output import add_action, print_json
from gateway.commands.store_access import StoreAccess
from tenants import export as transfer
from tenants.audit import SYSTEM
from tenants.export import ImportCounts


def add(actions: Any) -> None:
    export = add_action(
        actions, "export", "write accounts, their tokens and plans as JSON lines; never a token's secret"
    )
    export.add_argument("accounts", nargs="*", metavar="ACCOUNT", help="ids (default: all accounts, and all plans)")
    export.add_argument("--usage", action="store_true", help="with the ledger's records")
    export.add_argument("--audit", action="store_true", help="with the audit logs")
    bring_in = add_action(actions, "import", "add what an export has and this store has not")
    bring_in.add_argument("file", help="of `hearth accounts export`, by a server with the same secret")
    bring_in.add_argument("--dry-run", action="store_true", help="say what would be added, and change nothing")


async def export(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    found = [await tenantry.accounts.get(account_id) for account_id in dict.fromkeys(options.accounts)]
    whole = not options.accounts
    lines = transfer.export(
        tenantry.store, tenantry.secret, found or await tenantry.accounts.list(), int(time.time()),
        whole=whole, usage=options.usage, audit=options.audit,
    )  # fmt: skip
    with tqdm(unit=" lines", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        async for line in lines:
            sys.stdout.write(line.decode())
            bar.update()
    sys.stdout.flush()
    print(
        "the file has seals of tokens, no secrets; it can be imported under this server's secret alone", file=sys.stderr
    )
    return 0


async def import_file(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    with open(options.file, "rb") as file:  # noqa: ASYNC230 nothing else runs on this loop
        imported = await import_export_file(tenantry, file, options.dry_run)
    if options.json:
        print_json({"dry_run": options.dry_run, **asdict(imported)})
    elif imported.nothing:
        print("all of it is there already")
    else:
        print(f"{'would add' if options.dry_run else 'added'} {import_text(imported)}")
    return 0


async def import_export_file(tenantry: StoreAccess, file: BinaryIO, dry_run: bool) -> ImportCounts:
    """The whole file is checked before anything of it is added. Raises BadFile."""
    bytes_read = os.fstat(file.fileno()).st_size * (2 if dry_run else 3)
    silent = not sys.stderr.isatty()
    with tqdm(total=bytes_read, unit="B", unit_scale=True, file=sys.stderr, disable=silent) as bar:
        found = await transfer.inspect_export(file, tenantry.store, tenantry.secret, bar.update)
        if dry_run:
            return found
        imported = await transfer.import_accounts(file, tenantry.store, bar.update)
    for account_id in imported.accounts:
        await tenantry.note(account_id, "account.import", account_id)
    if not imported.nothing:
        await tenantry.note(SYSTEM, "import", os.path.basename(file.name), **_counts(imported))
    return imported


def import_text(imported: ImportCounts) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in _counts(imported).items())


def _counts(imported: ImportCounts) -> dict[str, int]:
    return {**asdict(imported), "accounts": len(imported.accounts)}
