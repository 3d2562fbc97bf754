"""The models of a whole cluster as commands change them: on a gateway's host, in the store, where one of two changes at
once is refused; their files stay where they are, and other hosts fetch them. A host of no cluster has none of it.
"""

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs
from tqdm import tqdm

from gateway.catalogue.catalogue import BUILT_IN
from gateway.catalogue.checksums import ChecksumError
from gateway.catalogue.manifest import ManifestError, manifest_bytes, read_manifest
from gateway.catalogue.mirror import WrongModel, checked_entry, read_mirror, write_mirror
from gateway.catalogue.registrations import (
    Registration,
    registration_of,
    remove_registration,
    save_registration,
)
from gateway.commands.access.own_host import own_member, require_no_machine
from gateway.commands.access.store_access import StoreAccess, ask_store
from gateway.commands.terminal.options import SettingsSource
from gateway.distribution.vault import ModelVault
from gateway.settings.config import Config, SettingsError
from tenants.audit import SYSTEM
from tenants.records.catalogue import CatalogueModel, CatalogueTooLarge, ClusterCatalogue
from tenants.store.protocol import StoreUnavailable

T = TypeVar("T")


def refresh_mirror(config: Config) -> None:
    """Has what is here say what the store says now, before a command changes it. Does nothing on a host of no cluster.
    Raises SettingsError on a machine's host, and what the store does."""
    require_no_machine(config, "; [[models]] in hearth.toml of this host is for this one alone")
    if own := own_member(config):
        _keep(config, own, _ask(config, lambda access: access.store.cluster.catalogue()) or ClusterCatalogue())


def fresh_config(source: SettingsSource) -> Config:
    """The settings, with what the cluster says now where there is one. Raises SettingsError."""
    config = source.load()
    try:
        refresh_mirror(config)
    except (StoreUnavailable, OSError) as error:
        raise SettingsError(f"the catalogue of the cluster cannot be asked now: {error}") from None
    return config


def shares_models(config: Config) -> bool:
    """Whether this host follows the catalogue of a cluster."""
    return bool(read_mirror(config.cluster.mirror_path(config.state)).own)


def save_model(config: Config, registration: Registration) -> str:
    """Why a model cannot be registered, here or for the whole cluster; empty where it was."""
    try:
        if is_shared(config, registration):
            share_model(config, registration)
        else:
            save_registration(registration)
    except (StoreUnavailable, ManifestError, ChecksumError, WrongModel, CatalogueTooLarge, SettingsError) as error:
        return str(error)
    except OSError as error:
        return f"{config.added_folder} cannot be written: {error.strerror}"
    return ""


def remove_model(config: Config, name: str) -> str:
    """Why a registration cannot be taken back; empty where it was. The model's files stay where they are."""
    try:
        if is_shared(config, registration_of(config, name)):
            _change(config, name, _listed(config, name), None)
        else:
            remove_registration(config, name)
    except (StoreUnavailable, SettingsError, OSError) as error:
        return str(error)
    return ""


def is_shared(config: Config, registration: Registration) -> bool:
    """Whether a registration is one of the whole cluster: what was told this host before it joined stays its own, as
    does what it pulled."""
    mirror, name = read_mirror(config.cluster.mirror_path(config.state)), registration.settings["name"]
    if not mirror.own or (
        registration.path.is_file() and registration.path != config.cluster.mirror_path(config.state)
    ):
        return False
    listed = any(model.name == name for model in mirror.catalogue.models)
    return listed or "folder" in registration.settings or name == BUILT_IN


def share_model(config: Config, registration: Registration) -> None:
    """Puts a model into the catalogue, or changes it there. Reads all files of a folder that is new. Raises
    SettingsError where another host changed it meanwhile, ManifestError, WrongModel, CatalogueTooLarge and what the
    store does."""
    settings = {name: value for name, value in registration.settings.items() if name not in ("name", "folder")}
    name, folder = registration.settings["name"], registration.settings.get("folder")
    before = _listed(config, name)
    files, hub = (before.files, before.hub) if before is not None else ([], "")
    if folder is not None and Path(folder).parent != config.cluster.models_folder(config.state):
        files, hub = _read_files(Path(folder)), _hub_place(config, Path(folder))
        ModelVault(config.cluster.models_folder(config.state)).link_folder(files, Path(folder))
    model = CatalogueModel(name, settings, files, hub)
    checked_entry(model)
    _change(config, name, before, model)


def _listed(config: Config, name: str) -> CatalogueModel | None:
    return next(
        (each for each in read_mirror(config.cluster.mirror_path(config.state)).catalogue.models if each.name == name),
        None,
    )


def _read_files(folder: Path) -> list[Any]:
    total = manifest_bytes(folder)
    with tqdm(total=total, desc="summing", unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        return read_manifest(folder, lambda count: bar.update(count) is not False)


def _hub_place(config: Config, folder: Path) -> str:
    """Where the hub has these files, as `hearth pull` brought them."""
    try:
        organisation, name = folder.resolve().relative_to(config.models_folder.resolve()).parts
        return f"{organisation}/{name}@{(folder / 'revision').read_text().strip()}"
    except (ValueError, OSError):
        return ""


def _change(config: Config, name: str, before: CatalogueModel | None, after: CatalogueModel | None) -> None:
    """Changes one model, whatever becomes of others meanwhile."""

    async def change(access: StoreAccess) -> ClusterCatalogue:
        while True:
            catalogue = await access.store.cluster.catalogue() or ClusterCatalogue()
            models = {model.name: model for model in catalogue.models}
            if models.get(name) != before:
                raise SettingsError(
                    f"{name} was {'removed' if name not in models else 'changed'} on another host meanwhile (revision "
                    f"{catalogue.number} of the catalogue): `hearth models list` shows what is there; say it again"
                )
            models.pop(name, None)
            changed = [*models.values()]
            if after is not None:
                _require_free_names(changed, after)
                changed.append(after)
            changed.sort(key=lambda model: model.name)
            revised = ClusterCatalogue(f"{catalogue.number + 1}-{secrets.token_hex(4)}", changed)
            if await access.store.cluster.put_catalogue(revised, catalogue.revision):
                action = "model.add" if before is None else "model.remove" if after is None else "model.change"
                settings = {} if after is None else after.settings
                await access.note(SYSTEM, action, name, revision=revised.revision, settings=settings)
                return revised

    _keep(config, own_member(config), _ask(config, change))


def _require_free_names(others: Sequence[CatalogueModel], model: CatalogueModel) -> None:
    """Raises SettingsError where another host gave a name to another model meanwhile."""
    names = {model.name, *model.settings.get("aliases", [])}
    for other in others:
        taken = {other.name, *other.settings.get("aliases", [])} & names
        if taken:
            raise SettingsError(f"{min(taken)} is a name of {other.name}: choose one that nothing has")


def _keep(config: Config, own: str, catalogue: ClusterCatalogue) -> None:
    mirror = structs.replace(read_mirror(config.cluster.mirror_path(config.state)), own=own, catalogue=catalogue)
    write_mirror(config.cluster.mirror_path(config.state), mirror)


def _ask(config: Config, question: Callable[[StoreAccess], Awaitable[T]]) -> T:
    return asyncio.run(ask_store(config, question))
