"""The keeper of a host as a process: it keeps the models of the catalogue, and gives their files to other hosts.

python -m gateway.distribution.process '<KeeperSettings JSON>'
"""

import fcntl
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from engine.log import log, log_uncaught
from engine.process.files import file_stamp
from gateway.catalogue.mirror import CatalogueMirror, read_mirror
from gateway.distribution.fetch import FileSource
from gateway.distribution.keeper import CatalogueKeeper
from gateway.distribution.settings import STATUS_NAME, KeeperSettings
from gateway.distribution.sources import sources_of
from gateway.distribution.status import write_status
from gateway.distribution.transfer import FileServer
from gateway.distribution.vault import ModelVault
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import IdentityError
from gateway.identity.settings import IdentityPaths
from gateway.members.own_machine import LOCK
from tenants.records.catalogue import CatalogueModel, HostCatalogue

_LOOK_S: Final = 0.25
_STATUS_S: Final = 0.5  # the shortest time between two reports of how far a file is


class KeeperProcess:
    """One keeper, and its files on this host."""

    def __init__(self, settings: KeeperSettings, files: HostFiles) -> None:
        self._settings = settings
        self._files = files
        self._folder = Path(settings.run_folder)
        self._mirror = CatalogueMirror()
        self._stamp: tuple[int, int, int] | None = None
        self._status: HostCatalogue | None = None
        self._written_at = 0.0
        vault = ModelVault(Path(settings.models))
        self.keeper = CatalogueKeeper(vault, self._look, self._sources, self._computes, self._note)

    def run(self) -> None:
        """Serves for ever. Raises OSError where it cannot."""
        FileServer(self._folder, self.keeper.find).start()
        while True:
            if not self.keeper.step():
                time.sleep(_LOOK_S)

    def _look(self) -> CatalogueMirror:
        """The mirror, read again where it changed."""
        path = Path(self._settings.mirror)
        if (stamp := file_stamp(path)) != self._stamp:
            self._mirror, self._stamp = read_mirror(path), stamp
        return self._mirror

    def _sources(self, mirror: CatalogueMirror, model: CatalogueModel) -> Sequence[FileSource]:
        return sources_of(mirror, model, self._files.credentials())

    def _computes(self) -> bool:
        """Whether replicas run on this host."""
        return self._mirror.is_machine or (self._folder / LOCK).exists()

    def _note(self, status: HostCatalogue) -> None:
        before, now = self._status, time.monotonic()
        if status == before:
            return
        advanced_only = before is not None and _settled(status) == _settled(before)
        if advanced_only and now < self._written_at + _STATUS_S:
            return
        for each in status.models:
            if before is None or (each.name, each.state, each.problem) not in {
                (one.name, one.state, one.problem) for one in before.models
            }:
                log("model_files", model=each.name, state=each.state, problem=each.problem)
        self._status, self._written_at = status, now
        write_status(self._folder / STATUS_NAME, status)


def _settled(status: HostCatalogue) -> HostCatalogue:
    """The status without how far its files are."""
    return structs.replace(status, models=[structs.replace(each, bytes=0) for each in status.models])


def main(words: Sequence[str]) -> int:
    """Runs the keeper that the JSON in words[0] describes, once no other runs in its folder."""
    settings = msgspec.json.decode(words[0], type=KeeperSettings)
    paths = IdentityPaths(Path(settings.certificate), Path(settings.key), Path(settings.authority))
    logging.basicConfig(level=logging.WARNING)
    log_uncaught()
    with (Path(settings.run_folder) / "keeper.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            KeeperProcess(settings, HostFiles(paths)).run()
        except (IdentityError, OSError) as error:
            log("keeper_cannot_run", level="error", problem=str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
