"""The cluster's catalogue as a host knows it: one file in the state folder, which stays as it was while no store or
gateway answers, and what follows from it here. It asks nobody.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.process.files import replace_file
from gateway.catalogue.manifest import ManifestError, manifest_digest, require_manifest, text_files
from gateway.cluster.route import preference
from gateway.identity.host_identity import HostRole
from gateway.settings.config import Config, ModelEntryConfig
from tenants.records.catalogue import CatalogueFile, CatalogueModel, ClusterCatalogue


class CatalogueMirror(msgspec.Struct, frozen=True):
    """What a host was told last.

    own       ROLE/NAME of the host that keeps this file.
    machines  names of all machines of the cluster.
    peers     member ids → HOST:PORT, of all whose certificates hold.
    having    names of models → ids of members that have all of their files.
    failed    names of models → names of machines that cannot have them now.
    """

    own: str = ""
    catalogue: ClusterCatalogue = ClusterCatalogue()
    machines: list[str] = []
    peers: dict[str, str] = {}
    having: dict[str, list[str]] = {}
    failed: dict[str, list[str]] = {}

    @property
    def is_machine(self) -> bool:
        return _is_machine(self.own)


class WrongModel(ValueError):
    """A model of the catalogue that this host cannot take; the message says why."""


def _is_machine(member_id: str) -> bool:
    return member_id.startswith(f"{HostRole.MACHINE}/")


def read_mirror(path: Path) -> CatalogueMirror:
    """What was kept; an empty one on a host of no cluster, and where the file cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CatalogueMirror)
    except (OSError, msgspec.MsgspecError):
        return CatalogueMirror()


def write_mirror(path: Path, mirror: CatalogueMirror) -> None:
    """Keeps what the host was told, and beside it what of that changes which models it serves. Raises OSError."""
    replace_file(path, msgspec.json.encode(mirror))
    served = [mirror.catalogue.revision]
    for model in mirror.catalogue.models:
        with contextlib.suppress(ManifestError):
            served += [model.name] * bool(needed_files(mirror, model, True))
    digest, followed = msgspec.json.encode(served), followed_path(path)
    if not followed.exists() or followed.read_bytes() != digest:
        replace_file(followed, digest)


def followed_path(path: Path) -> Path:
    """The file beside a mirror that changes with the models that its host serves, and not as other hosts get on."""
    return path.with_suffix(".served")


def holders(mirror: CatalogueMirror, model: CatalogueModel) -> list[str]:
    """The machines that are to hold a model: all, or as many as its settings say, by the order in which calls wake
    them. One that failed goes on trying while the next in the order holds the model as well, and one that has it keeps
    it until as many before it have it too."""
    copies = model.settings.get("machines") or len(mirror.machines)
    failed = mirror.failed.get(model.name, ())
    having = {member.partition("/")[2] for member in mirror.having.get(model.name, ()) if _is_machine(member)}
    chosen: list[str] = []
    working = complete = 0
    for machine in sorted(mirror.machines, key=lambda name: (-preference(name, 1.0, model.name), name)):
        if working < copies or (machine in having and complete < copies):
            chosen.append(machine)
        working += machine not in failed
        complete += machine in having
    return chosen


def needed_files(mirror: CatalogueMirror, model: CatalogueModel, weights: bool) -> list[CatalogueFile]:
    """The files that this host is to have: all where it computes the model, those that a gateway reads where it only
    calls it, none where other machines hold it. Raises ManifestError."""
    require_manifest(model)
    if mirror.is_machine:
        name = mirror.own.partition("/")[2]
        return model.files if name in holders(mirror, model) else []
    return model.files if weights else text_files(model.files)


def files_folder(config: Config, files: Sequence[CatalogueFile]) -> Path:
    """Where these files are once they are all there and have their sums."""
    return config.cluster.models_folder(config.state) / manifest_digest(files)


def mirrored_settings(config: Config, mirror: CatalogueMirror) -> Iterator[dict[str, Any]]:
    """The settings of each model of the catalogue whose files are here, with their folder; a model without files lays
    its settings over one that each host has by itself."""
    for model in mirror.catalogue.models:
        try:
            folder = model_folder(config, mirror, model)
            checked_entry(model)
        except (ManifestError, WrongModel):  # its keeper says so
            continue
        if not model.files:
            yield model.settings | {"name": model.name}
        elif folder is not None:
            yield model.settings | {"name": model.name, "folder": str(folder)}


def model_folder(config: Config, mirror: CatalogueMirror, model: CatalogueModel) -> Path | None:
    """The folder of what this host needs of a model: a machine's has all files, a gateway's those that it reads, and
    the weights too where they came. Raises ManifestError."""
    for weights in (True, False):
        files = needed_files(mirror, model, weights)
        if files and (folder := files_folder(config, files)).is_dir():
            return folder
    return None


def checked_entry(model: CatalogueModel) -> ModelEntryConfig:
    """The model's settings. Raises WrongModel for what this Hearth does not know."""
    try:
        return msgspec.convert(_without_paths(model.settings) | {"name": model.name}, ModelEntryConfig, strict=False)
    except msgspec.ValidationError as error:
        raise WrongModel(f"this host's Hearth does not know its settings: {error}") from None


def _without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WrongModel: what is a path on one host is none, or another file, on the next."""
    for name in ("folder", "public_prefixes"):
        if name in settings:
            raise WrongModel(f"its settings name {name}, which is of one host alone")
    return dict(settings)
