"""What a host of a cluster does for the models of its catalogue: it finds out which files it should have, fetches what
is missing, one file after the other, and removes what nobody asks for any more. It knows files and peers, and no store.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from engine.process.supervised import Backoff
from gateway.catalogue.manifest import ManifestError, require_manifest, text_files
from gateway.catalogue.mirror import CatalogueMirror, WrongModel, checked_entry, needed_files
from gateway.distribution.fetch import FetchError, FileFetcher, FileSource, NoRoom
from gateway.distribution.status import FAILED, FETCHING, READY, WAITING
from gateway.distribution.transfer import TransferError
from gateway.distribution.vault import ModelVault
from tenants.records.catalogue import CatalogueFile, CatalogueModel, HostCatalogue, ModelProgress

FAILURES: Final = 3  # in a row, after which another machine is to have the model as well
KEEP_S: Final = 3600.0  # files of a model that went stay so long: calls that run still read them, and it may come back
_RETRY_S: Final = (2.0, 60.0)
_READ_BYTES: Final = 1 << 20


class SourceFinder(Protocol):
    """Where files of a model may be, best first."""

    def __call__(self, mirror: CatalogueMirror, model: CatalogueModel) -> Sequence[FileSource]: ...


class Superseded(Exception):
    """The catalogue changed while a file was being fetched: what is to be done is found out anew."""


class LocalFiles:
    """See FileSource: the files of other models on this host, and of an operator's folder."""

    name = "this host"

    def __init__(self, find: Callable[[str], Path | None]) -> None:
        self._find = find

    def read(self, sha256: str, offset: int) -> Iterator[bytes]:
        """Raises TransferError."""
        path = self._find(sha256)
        if path is None:
            raise TransferError("")
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                while piece := file.read(_READ_BYTES):
                    yield piece
        except OSError as error:
            raise TransferError(f"this host: {error}") from None


@dataclass
class _Attempt:
    """What became of a model's files so far."""

    backoff: Backoff = field(default_factory=lambda: Backoff(*_RETRY_S))
    again_at: float = 0.0
    state: str = WAITING
    problem: str = ""


class CatalogueKeeper:
    """Keeps one host. `mirror` is what the host was told last, `sources` where files may be; `weights` says whether it
    computes the models; `note` is told what the host has whenever that may have changed."""

    def __init__(
        self,
        vault: ModelVault,
        mirror: Callable[[], CatalogueMirror],
        sources: SourceFinder,
        weights: Callable[[], bool],
        note: Callable[[HostCatalogue], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vault = vault
        self._read_mirror = mirror
        self._sources = sources
        self._weights = weights
        self._note = note
        self._clock = clock
        self._fetcher = FileFetcher(vault.incoming, self._advanced, clock)
        self._attempts: dict[str, _Attempt] = {}
        self._unwanted_since: dict[Path, float] = {}
        self._mirror = CatalogueMirror()

    def step(self) -> bool:
        """Fetches the files of one model, the smallest that is missing first. False: there is nothing to fetch now."""
        self._mirror = self._read_mirror()
        if not self._mirror.catalogue.revision:
            return False
        missing = self._look()
        self._forget()
        self._tell()
        if not missing:
            return False
        model, files = min(missing, key=lambda each: sum(file.bytes for file in each[1]))
        try:
            self._fetch(model, files)
        except Superseded:
            return True
        self._tell()
        return True

    def find(self, sha256: str) -> Path | None:
        """The path of a file of the catalogue that is here, by its sum."""
        for model in self._mirror.catalogue.models:
            for file in model.files:
                if file.sha256 == sha256:
                    return self._vault.find(file, self._complete())
        return None

    def _complete(self) -> list[list[CatalogueFile]]:
        """The files of each model, all of them and those that a gateway has, as far as their folders are here."""
        sets = [files for model in self._mirror.catalogue.models for files in self._sets(model)]
        return [files for files in sets if self._vault.has(files)]

    def _sets(self, model: CatalogueModel) -> list[list[CatalogueFile]]:
        """What a host may have of a model."""
        return [model.files, text_files(model.files)] if model.files else []

    def _look(self) -> list[tuple[CatalogueModel, list[CatalogueFile]]]:
        """The models whose files are to be fetched now."""
        missing, now = [], self._clock()
        for model in self._mirror.catalogue.models:
            attempt = self._attempts.setdefault(self._key(model), _Attempt())
            try:
                checked_entry(model)
                require_manifest(model)
            except (ManifestError, WrongModel) as error:
                attempt.state, attempt.problem = FAILED, str(error)
                continue
            wanted = self._wanted(model, (False, True) if self._weights() else (False,))
            lacking = [files for files in wanted if not self._vault.has(files)]
            if not lacking or self._vault.has(model.files):
                attempt.state, attempt.problem = READY, ""
            elif now >= attempt.again_at:
                missing.append((model, lacking[0]))
                if attempt.state == READY:  # its files were taken away
                    attempt.state = WAITING
        return missing

    def _wanted(self, model: CatalogueModel, weights: Sequence[bool]) -> list[list[CatalogueFile]]:
        """What this host is to have of a model, with its weights or without them; nothing of one that is refused."""
        try:
            found = [needed_files(self._mirror, model, each) for each in weights]
        except ManifestError:
            return []
        return [files for files in found if files]

    def _fetch(self, model: CatalogueModel, files: Sequence[CatalogueFile]) -> None:
        """Raises Superseded."""
        attempt = self._attempts[self._key(model)]
        if attempt.state != FAILED:  # that is said until it has succeeded
            attempt.state = FETCHING
        try:
            sources = [LocalFiles(self.find), *self._sources(self._mirror, model)]
            paths = [self._fetcher.fetch(file, sources) for file in files]
            self._vault.publish(files, paths)
            attempt.state, attempt.problem = READY, ""
            attempt.backoff.reset()
        except (FetchError, OSError) as error:
            attempt.again_at = self._clock() + attempt.backoff.fail()
            own_fault = isinstance(error, NoRoom) or not isinstance(error, FetchError)
            attempt.problem = str(error)
            if own_fault or (self._others(model) and attempt.backoff.failures >= FAILURES):
                attempt.state = FAILED
            elif not self._others(model):
                attempt.state = WAITING

    def _others(self, model: CatalogueModel) -> bool:
        """Whether anybody else is said to have the files."""
        return bool(model.hub or set(self._mirror.having.get(model.name, ())) - {self._mirror.own})

    def _advanced(self, _: int) -> None:
        """Raises Superseded where the catalogue changed."""
        self._tell()
        if self._read_mirror().catalogue.revision != self._mirror.catalogue.revision:
            raise Superseded

    def _forget(self) -> None:
        """Removes folders and files that were asked for no more for a while."""
        now, models = self._clock(), self._mirror.catalogue.models
        sets = [files for model in models for files in self._wanted(model, (False, True))]
        wanted = {self._vault.place(files) for files in sets}
        for place in self._vault.places():
            if place in wanted:
                self._unwanted_since.pop(place, None)
            elif now - self._unwanted_since.setdefault(place, now) >= KEEP_S:
                self._vault.remove(place)
                del self._unwanted_since[place]
        missing = [files for files in sets if not self._vault.has(files)]
        self._vault.clear_incoming({file.sha256 for files in missing for file in files})
        keys = {self._key(model) for model in models}
        self._attempts = {key: attempt for key, attempt in self._attempts.items() if key in keys}

    def _tell(self) -> None:
        models = []
        for model in self._mirror.catalogue.models:
            attempt = self._attempts.get(self._key(model))
            files = next(iter(self._wanted(model, [self._weights()])), [])
            if attempt is None or not (files or attempt.problem):
                continue
            if self._vault.has(model.files):  # also on a gateway's host, which then gives the weights to others
                files = model.files
            total = sum(file.bytes for file in files)
            there = total if attempt.state == READY else sum(map(self._fetcher.bytes_of, files))
            models.append(ModelProgress(model.name, attempt.state, there, total, attempt.problem))
        self._note(HostCatalogue(self._mirror.own, self._mirror.catalogue.revision, models))

    def _key(self, model: CatalogueModel) -> str:
        return f"{model.name} {self._vault.place(model.files).name}"
