"""`hearth backup`: a folder with all that a server knows about tenants, made while it runs, for `hearth restore`."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from cyclopts import Parameter

from gateway.commands.access.store_access import opened_store
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail, format_bytes, print_either, progress, progress_bar
from gateway.commands.usage import balances
from gateway.host_region import host_region
from gateway.identity.host_identity import IdentityError
from gateway.settings.config import Config
from gateway.state_dir import server_secret
from tenants import export
from tenants.audit import SYSTEM, AuditLog
from tenants.limits.outbox import SUFFIX
from tenants.store.protocol import RETENTION_DAYS, Store, StoreUnavailable
from tenants.store.sqlite.backup import check, close_up, copy

_TEACHING: Final = """\
examples:
  hearth backup /var/backups/hearth-monday             a new folder; a server may run meanwhile
  hearth backup backups/1 --json
  hearth restore backups/1                             where no server runs: brings it back

In the folder are a copy of the store, the server's secret, settlements that wait for the store, and checksums. The
secret seals tokens and the audit log: keep the folder like a private key, and in the region that it names, which is
this host's. The copy is checked before the folder
appears: SQLite's integrity, the schema's version, counters against records, the audit log. Exit status 1: it is not
there, or the store is not in order.
Of a store in Redis it is an export with usage and audit logs: open requests, the running minute's rates and notices on
their way are not in it. Let Redis keep a full copy itself, by its append-only file and by BGSAVE.
"""
FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
DATABASE: Final = "hearth.db"
EXPORT: Final = "accounts.jsonl"
SECRET: Final = "secret"
OUTBOX: Final = "outbox"


class BackupFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a backup."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`store` is the file that the store is in: DATABASE, or EXPORT. `files` are by their path below the folder. The
    host that made it was in `region`."""

    format: int
    made_at: int
    store: str
    files: dict[str, BackupFile]
    region: str = ""


app = command_app("backup", "copy the store and the secret into a folder, also while serving", _TEACHING)


@app.default
def backup(
    folder: Annotated[Path, Parameter(help="a new one, or an empty one")], /, *, json: Json = False, source: Source
) -> int:
    """Copy the store and the secret into a folder, also while serving."""
    config, folder = source.load(), folder.resolve()
    database = sqlite_path(config)
    if database is not None and not database.exists():
        return fail(f"there is no store yet: {database}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return fail(f"{folder} is there already: name a new folder")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        partial.mkdir(mode=0o700, parents=True)
        manifest, problems = _fill(config, partial)
        os.rename(partial, folder)
    except (StoreUnavailable, OSError, IdentityError) as error:
        return fail(str(error))
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _report(folder, manifest, problems, json)


def _fill(config: Config, folder: Path) -> tuple[Manifest, list[str]]:
    """Makes all files there; also returns what is not in order in the store, in words."""
    secret = server_secret(config)
    made_at, database = int(time.time()), sqlite_path(config)
    copy_file(config.secret_path, folder / SECRET)
    # The outbox first: a settlement that meanwhile goes from there into the store is in both, and counts once.
    for path in sorted(config.outbox_folder.glob(f"*{SUFFIX}")):
        copy_file(path, folder / OUTBOX / path.name)
    if database is None:
        store, problems = EXPORT, asyncio.run(_export(config, folder / EXPORT, secret))
    else:
        store, problems = DATABASE, _copy(database, folder / DATABASE, secret)
    files = {str(path.relative_to(folder)): backup_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = Manifest(FORMAT, made_at, store, files, host_region(config))
    with open_private(folder / MANIFEST) as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest, problems


def _copy(database: Path, target: Path, secret: bytes) -> list[str]:
    with progress_bar(desc="copy", unit=" pages") as bar:

        def on_pages(left: int, pages: int) -> None:
            bar.total = pages
            bar.update(pages - left - bar.n)

        copy(database, target, on_pages)
    problems = asyncio.run(examine_database(target, secret))
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return problems


async def examine_database(database: Path, secret: bytes) -> list[str]:
    """What is not in order in a copy that nobody else has open, in words. It has this version's schema afterwards.
    Raises StoreUnavailable where it cannot be used at all."""
    check(database)
    async with opened_store(f"sqlite:{database}") as store:
        problems = await examine_store(store, secret)
    close_up(database)
    return problems


async def examine_store(store: Store, secret: bytes) -> list[str]:
    """Compares all counters with the records, and walks all audit logs."""
    today, audit = int(time.time()) // 86_400, AuditLog(store.audit, secret)
    ids, problems = [account.id for account in await store.accounts.list()], []
    for account_id in progress([SYSTEM, *ids], "accounts", "check"):
        async for row in balances(store, account_id, range(today - RETENTION_DAYS, today + 2)):
            if row.counted != row.recorded:
                where = f"account {row.account_id}, day {row.day}, {row.subject}"
                problems.append(f"{where}: {row.counted} counted and {row.recorded} recorded")
        verdict = await audit.verify(account_id)
        if verdict.problem is not None:
            problems.append(f"audit log of {account_id or 'the system'}, entry {verdict.seq}: {verdict.problem}")
    return problems


async def _export(config: Config, target: Path, secret: bytes) -> list[str]:
    async with opened_store(config.store_url) as store:
        accounts, now_s = await store.accounts.list(), int(time.time())
        with open_private(target) as file:
            async for line in export.export(store, secret, accounts, now_s, whole=True, usage=True, audit=True):
                file.write(line)
        return await examine_store(store, secret)


def _report(folder: Path, manifest: Manifest, problems: list[str], as_json: bool) -> int:
    size = format_bytes(sum(file.bytes for file in manifest.files.values()))
    where = f", of {manifest.region}" if manifest.region else ""
    document = {"folder": str(folder), **msgspec.to_builtins(manifest), "problems": problems}
    print_either(as_json, document, lambda: print(f"{folder}: {len(manifest.files)} files, {size}{where}"))
    if manifest.store == EXPORT:
        print("this is an export; let Redis keep a full copy itself (appendonly yes, BGSAVE)", file=sys.stderr)
    for problem in problems:
        fail(f"not in order, here and in the store: {problem}")
    return int(bool(problems))


def sqlite_path(config: Config) -> Path | None:
    """None where the store is not SQLite."""
    kind, _, path = config.store_url.partition(":")
    return Path(path) if kind == "sqlite" else None


def backup_file(path: Path) -> BackupFile:
    with path.open("rb") as file:
        return BackupFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def copy_file(source: Path, target: Path) -> None:
    """On the disk when this returns, for this user alone; its folder is made. Raises OSError."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with source.open("rb") as original, open_private(target) as copied:
        shutil.copyfileobj(original, copied)


@contextlib.contextmanager
def open_private(path: Path) -> Iterator[BinaryIO]:
    """A new file for this user alone, on the disk at the end. Raises OSError."""
    with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
