"""The folders of the cluster's models on this host: each is named by its files' sums, and is there once all of them
are. It fetches nothing.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from gateway.catalogue.checksums import write_sums
from gateway.catalogue.manifest import manifest_digest
from tenants.records.catalogue import CatalogueFile


class ModelVault:
    """`folder` has a folder for each model; what is on its way is beside it, on the same disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incoming = folder.with_name(".incoming")
        for each in (self.folder, self.incoming):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)

    def place(self, files: Sequence[CatalogueFile]) -> Path:
        return self.folder / manifest_digest(files)

    def has(self, files: Sequence[CatalogueFile]) -> bool:
        return self.place(files).is_dir()

    def link_folder(self, files: Sequence[CatalogueFile], folder: Path) -> None:
        """Takes a folder of the operator's, which has these files, as it is and where it is."""
        place = self.place(files)
        if place.is_symlink() and not place.is_dir():
            place.unlink()  # the folder that it led to is gone
        with contextlib.suppress(FileExistsError):
            place.symlink_to(folder.resolve(), target_is_directory=True)

    def find(self, file: CatalogueFile, models: Sequence[Sequence[CatalogueFile]]) -> Path | None:
        """This file in a model that is here, under whatever name it has there."""
        for files in models:
            for each in files:
                path = self.place(files) / each.name
                if each.sha256 == file.sha256 and path.is_file() and path.stat().st_size == file.bytes:
                    return path
        return None

    def publish(self, files: Sequence[CatalogueFile], paths: Sequence[Path]) -> None:
        """Makes the model's folder of its files, which are at `paths` and have their sums, in one step. Raises
        OSError."""
        with tempfile.TemporaryDirectory(dir=self.incoming, prefix="folder-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir(mode=0o700)
            for file, path in zip(files, paths, strict=True):
                (made / file.name).parent.mkdir(exist_ok=True)
                os.link(path, made / file.name)
            write_sums(made, {file.name: file.sha256 for file in files})
            place = self.place(files)
            if place.is_symlink():  # the operator's folder that it led to is gone
                place.unlink()
            os.rename(made, place)
        for path in paths:
            if path.parent == self.incoming:
                path.unlink(missing_ok=True)

    def places(self) -> list[Path]:
        """The folders of all models that are here."""
        return sorted(self.folder.iterdir())

    def remove(self, place: Path) -> None:
        """Removes a model's folder; of one that leads to an operator's folder the link alone."""
        if place.is_symlink():
            place.unlink()
            return
        (place / "config.json").unlink(missing_ok=True)  # first what makes it a model
        shutil.rmtree(place, ignore_errors=True)

    def clear_incoming(self, wanted: Collection[str]) -> None:
        """Removes what no model wants of what is on its way; `wanted` are sums."""
        for path in self.incoming.iterdir():
            if path.is_file() and path.name.removesuffix(".part") not in wanted:
                path.unlink(missing_ok=True)
