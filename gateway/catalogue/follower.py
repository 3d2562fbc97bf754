"""Keeps the catalogue of a running gateway as hearth.toml and `hearth models` ask for it: it looks at the files, reads
them in a thread where one changed, and changes the catalogue as a whole. It knows neither replicas nor requests.
"""

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from typing import Final

import msgspec

from engine.process.files import fingerprint
from gateway.catalogue.catalogue import Catalogue, folder_of, model_entries, open_catalogue, read_files
from gateway.catalogue.mirror import followed_path
from gateway.catalogue.report import remove_report, write_report
from gateway.settings.config import CONFIG_NAME, Config, ModelEntryConfig, SettingsError, SettingsFile

LOOK_S: Final = 0.2  # a file that was still being written at the last look is looked at again first

log = logging.getLogger(__name__)


def followed_paths(config: Config, config_path: str | None) -> list[str]:
    """The files and folders on which it depends what is served: settings, what was pulled or added, and of each model
    what a gateway reads."""
    paths = [Path(config_path or CONFIG_NAME).absolute(), config.added_folder, config.models_folder]
    paths += [followed_path(config.cluster.mirror_path(config.state)), config.cluster.models_folder(config.state)]
    entries: list[ModelEntryConfig] = []
    with contextlib.suppress(SettingsError):  # what was added, which is among the paths, is wrong
        entries = model_entries(config)
    for entry in entries:
        paths += [*read_files(folder_of(config, entry)), *map(Path, entry.public_prefixes)]
    return [str(path) for path in paths]


class CatalogueFollower:
    """Follows what is asked for in `source`, from `config` on; None: that stays as it is.

    catalogue  what is served now; it stays the same object.
    """

    def __init__(self, config: Config, source: SettingsFile | None) -> None:
        """Reads the models' folders. Raises SettingsError."""
        self.catalogue = open_catalogue(config)
        self._config = config
        self._source = source
        self._problem = ""
        self._others: list[str] = []
        self._reporting = threading.Lock()  # a thread may still read as this ends
        self._ended = False

    async def run(self) -> None:
        """Until cancelled."""
        if self._source is None:
            return
        self._ended = False
        try:
            await self._follow(self._source)
        finally:
            with self._reporting, contextlib.suppress(OSError):
                self._ended = True
                remove_report(self._config)

    async def _follow(self, source: SettingsFile) -> None:
        read, before, paths = "", "", followed_paths(self._config, source.path)
        while True:
            seen = await asyncio.to_thread(fingerprint, paths)
            if seen != read and seen == before:
                await asyncio.to_thread(self._read, source)
                read, paths = seen, followed_paths(self._config, source.path)
            before = seen
            await asyncio.sleep(LOOK_S)

    def _read(self, source: SettingsFile) -> None:
        """Takes over what is asked for now. What is wrong changes nothing, and is said."""
        try:
            loaded = source.load()
            self._warn_of_others(loaded)
            config = msgspec.structs.replace(self._config, models=loaded.models)
            opened = open_catalogue(config, self.catalogue)
        except Exception as error:  # whatever it is, also a bug: what is served goes on
            problem = str(error) if isinstance(error, SettingsError) else f"{type(error).__name__}: {error}"
            if problem != self._problem:
                log.error("settings_refused", extra={"fields": {"problem": problem}})
            self._problem = problem
        else:
            self._take(config, opened)
        with self._reporting, contextlib.suppress(OSError):  # of a full disk others tell
            if not self._ended:
                entries = [model.settings for model in self.catalogue]
                write_report(self._config, entries, self.catalogue.problems, self._problem)

    def _warn_of_others(self, loaded: Config) -> None:
        """Says which tables changed that are read at a start alone."""
        tables = [name for name in Config.__struct_fields__ if name != "models"]
        others = [name for name in tables if getattr(loaded, name) != getattr(self._config, name)]
        if others != self._others:
            self._others = others
            if others:
                log.warning("settings_wait_for_a_restart", extra={"fields": {"tables": others}})

    def _take(self, config: Config, opened: Catalogue) -> None:
        before = {model.name: model for model in self.catalogue}
        now = {model.name: model for model in opened}
        changed = [name for name in now.keys() & before.keys() if now[name] is not before[name]]
        self._config, self._problem = config, ""
        self.catalogue.replace(opened, opened.problems)
        fields = {
            "added": sorted(now.keys() - before.keys()),
            "removed": sorted(before.keys() - now.keys()),
            "changed": sorted(changed),
            "problems": opened.problems,
        }
        if any(fields.values()):
            log.info("catalogue_changed", extra={"fields": fields})
