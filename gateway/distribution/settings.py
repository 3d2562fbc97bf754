"""What a keeper is told as it starts."""

import sys
from pathlib import Path
from typing import Final

import msgspec

from gateway.settings.config import Config

STATUS_NAME: Final = "catalogue-status.json"


class KeeperSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a keeper needs, as one JSON document."""

    run_folder: str  # of its socket, its status and its lock
    mirror: str
    models: str  # where the models' folders are
    certificate: str
    key: str
    authority: str


def status_path(config: Config) -> Path:
    """Where this host's keeper says what it has."""
    return config.run_folder / STATUS_NAME


def keeper_command(config: Config) -> list[str]:
    """The keeper of a host that has joined a cluster."""
    paths = config.cluster.paths(config.state)
    settings = KeeperSettings(
        run_folder=str(config.run_folder),
        mirror=str(config.cluster.mirror_path(config.state)),
        models=str(config.cluster.models_folder(config.state)),
        certificate=str(paths.certificate),
        key=str(paths.key),
        authority=str(paths.authority),
    )
    return [sys.executable, "-P", "-m", "gateway.distribution.process", msgspec.json.encode(settings).decode()]
