"""`hearth restore`: what `hearth backup` made, back into place, where no server runs."""

import asyncio
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from gateway.commands.access.store_access import StoreAccess, opened_store, with_store_access
from gateway.commands.account_tools.transfer import import_export_file
from gateway.commands.backup import (
    DATABASE,
    EXPORT,
    FORMAT,
    MANIFEST,
    OUTBOX,
    SECRET,
    Manifest,
    backup_file,
    copy_file,
    examine_database,
    sqlite_path,
)
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail, print_either, time_text
from gateway.host_region import host_region
from gateway.settings.config import Config, SettingsError
from gateway.state_dir import exclusive_state, open_state
from tenants import export as transfer
from tenants.audit import SYSTEM
from tenants.limits.outbox import SUFFIX
from tenants.open import safe_url
from tenants.store.protocol import StoreUnavailable
from tenants.store.sqlite.backup import close_up

_TEACHING: Final = """\
examples:
  hearth restore backups/1                             into the configured store and state folder
  hearth restore backups/1 --state /srv/hearth/.hearth
  hearth restore backups/1 --force                     also where there is a store already: it is moved aside

All checksums are looked at before anything is changed. It refuses while a server has the store open, and to overwrite
a store or a secret without --force; what was there stays beside it as NAME.replaced-TIME. An older version's store is
taken along to this one's. A backup of Redis is an export: it is added to the configured store, which may be SQLite or
an empty Redis; gateways on other hosts must be stopped by you. `hearth serve` makes new first credentials afterwards.
Exit status 1: nothing was changed, or what was restored is not in order; it says which.
"""
_NAME: Final = re.compile(rf"{SECRET}|{DATABASE}|{EXPORT}|{OUTBOX}/[0-9a-f]{{32}}\.outbox")


app = command_app("restore", "bring a backup back, where no server runs", _TEACHING)


@app.default
def restore(
    folder: Annotated[Path, Parameter(help="of `hearth backup`")],
    /,
    *,
    force: Annotated[bool, Parameter(help="also over a store and a secret that are there")] = False,
    from_region: Annotated[str, Parameter(help="also a backup of this region, on a host elsewhere")] = "",
    json: Json = False,
    source: Source,
) -> int:
    """Bring a backup back, where no server runs."""
    config = source.load()
    try:
        manifest = _checked(folder)
        if manifest.region not in ("", from_region) and manifest.region != (here := host_region(config)):
            raise SettingsError(
                f"{folder} is of {manifest.region}, and this host is in {here or 'a place without a name'}: data "
                f"stays in its region; `--from-region {manifest.region}` brings it here all the same"
            )
        open_state(config)
        with exclusive_state(config):
            problems = _restore(config, folder, manifest, force)
            if status := with_store_access(config, lambda access: _finish(access, folder, manifest), makes=True):
                return status
    except (StoreUnavailable, OSError, ValueError) as error:
        return fail(str(error))
    document = {"made_at": manifest.made_at, "store": safe_url(config.store_url), "problems": problems}
    print_either(json, document, lambda: print(f"restored as it was on {time_text(manifest.made_at)} UTC"))
    for problem in problems:
        fail(f"restored, and not in order, as it was in the backup: {problem}")
    return int(bool(problems))


def _checked(folder: Path) -> Manifest:
    """Raises SettingsError for what is no backup, of another format, or not as it was made."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise SettingsError(f"{folder} is no backup: it has no {MANIFEST}") from None
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{folder / MANIFEST}: {error}") from error
    if manifest.format != FORMAT:
        raise SettingsError(
            f"{folder} has format {manifest.format}; this Hearth reads {FORMAT}: use the one that made it"
        )
    for name, recorded in manifest.files.items():
        if not _NAME.fullmatch(name):
            raise SettingsError(f"{folder / MANIFEST} names {name!r}, which no backup has")
        if not (folder / name).is_file() or backup_file(folder / name) != recorded:
            raise SettingsError(f"{folder / name} is not as it was made: take another backup")
    if not {SECRET, manifest.store} <= manifest.files.keys():
        raise SettingsError(f"{folder / MANIFEST} lacks {SECRET} or {manifest.store}")
    return manifest


def _restore(config: Config, folder: Path, manifest: Manifest, force: bool) -> list[str]:
    """Puts the files into place, but for the store of an export; returns what is not in order in the store."""
    database, problems = sqlite_path(config), []
    if manifest.store == DATABASE and database is None:
        raise SettingsError(
            f"{folder} is of SQLite and [store] url is not: restore it with `[store] url` unset, then take it along by "
            "`hearth accounts export --usage --audit` and `hearth accounts import`"
        )
    replaced = _in_the_way(config, folder, manifest, database)
    if replaced and not force:
        raise SettingsError(f"{replaced[0]} is there already; --force moves it aside")
    if database is not None and database.exists():
        close_up(database)
    secret, fresh = bytes.fromhex((folder / SECRET).read_text()), []
    if manifest.store == EXPORT:
        asyncio.run(_look(config, folder / EXPORT, secret, config.secret_path in replaced))
    try:
        if manifest.store == DATABASE:
            assert database is not None
            database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.append((_beside(folder / DATABASE, database), database))
            problems = asyncio.run(examine_database(fresh[0][0], secret))
        fresh.append((_beside(folder / SECRET, config.secret_path), config.secret_path))
        _move_aside(replaced)
        for temporary, path in fresh:
            os.replace(temporary, path)
    finally:
        for temporary, _ in fresh:
            temporary.unlink(missing_ok=True)
    for name in manifest.files:
        target = config.outbox_folder / Path(name).name
        if name.startswith(OUTBOX) and not target.exists():
            copy_file(folder / name, target)
    return problems


async def _look(config: Config, export: Path, secret: bytes, other_secret: bool) -> None:
    """Raises ValueError or SettingsError where the store cannot take the export."""
    async with opened_store(config.store_url) as store:
        if other_secret and await store.accounts.list():
            raise SettingsError(f"{safe_url(config.store_url)} has accounts whose tokens are sealed by another secret")
        with export.open("rb") as file:
            await transfer.inspect_export(file, store, secret, lambda count: None)


def _in_the_way(config: Config, folder: Path, manifest: Manifest, database: Path | None) -> list[Path]:
    """Files whose place the restore takes. An export is added to its store, and so takes nothing's place there."""
    obstacles: list[Path] = []
    if manifest.store == DATABASE and database is not None:
        obstacles += [database, *(database.with_name(f"{database.name}{end}") for end in ("-wal", "-shm"))]
        obstacles += sorted(config.outbox_folder.glob(f"*{SUFFIX}"))
    if config.secret_path.exists() and config.secret_path.read_bytes() != (folder / SECRET).read_bytes():
        obstacles.append(config.secret_path)
    return [path for path in obstacles if path.exists()]


def _beside(source: Path, path: Path) -> Path:
    """A copy in the folder of `path`, that takes its place in one step later."""
    temporary = path.with_name(f"{path.name}.restoring-{os.getpid()}")
    copy_file(source, temporary)
    return temporary


def _move_aside(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():  # closing the store may have taken its log away
            os.rename(path, path.with_name(f"{path.name}.replaced-{int(time.time())}"))


async def _finish(access: StoreAccess, folder: Path, manifest: Manifest) -> None:
    if manifest.store == EXPORT:
        with (folder / EXPORT).open("rb") as file:
            await import_export_file(access, file, dry_run=False)
    await access.note(SYSTEM, "store.restore", folder.name, made_at=manifest.made_at)
