"""What was found out about a model on one kind of device, kept beside its weights so that no later start has to find it
out again. It knows files and what they depend on, and neither models nor devices.

    MODEL/.hearth/KEY.json      what was measured, for one key
    MODEL/.hearth/kernels/      compiled kernels, which have keys of their own (kernels/compiled.py)

Where the model's folder cannot be written they are in the cache of compiled kernels alone, which all models share;
there a model also finds what was measured for another of the same sizes. A key says everything that what is kept
depends on. Whatever else is found under its name is as nothing.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from engine.process.files import replace_file

log = logging.getLogger(__name__)

_FOLDER: Final = ".hearth"
_KERNELS_FOLDER: Final = f"{_FOLDER}/kernels"  # below the model's folder
_KEYS_MAX: Final = 16  # in a folder; the oldest go
Artifact = TypeVar("Artifact", bound=msgspec.Struct)


ArtifactKey = Mapping[str, str | int | None]


class ArtifactFiles(Generic[Artifact]):
    """Those of one model under one key, and of one kind."""

    def __init__(self, folder: Path, key: ArtifactKey, kind: type[Artifact]) -> None:
        """`folder` is the model's."""
        self.kernels_folder = folder / _KERNELS_FOLDER
        self._key = dict(key)
        self._kind = kind
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16] + ".json"
        shared = os.environ.get(KERNEL_CACHE_VARIABLE)
        self.files = [place / name for place in (folder / _FOLDER, *([Path(shared)] if shared else []))]

    def read(self) -> Artifact | None:
        """What was written. Whatever is odd about a file, it is as if there were none."""
        for file in self.files:
            with suppress(OSError, ValueError, TypeError, KeyError):  # msgspec's errors are ValueErrors
                document = json.loads(file.read_bytes())
                if document["key"] == self._key:
                    found = msgspec.convert(document["found"], self._kind)
                    log.info("found by an earlier start: %s", file)
                    return found
        return None

    def write(self, found: Artifact) -> list[Path]:
        """Keeps it in every place that can be written; gives these. It never fails: what is lost is time."""
        # JSON of the standard library, because what never pays costs infinitely much.
        document = json.dumps({"key": self._key, "found": msgspec.to_builtins(found)}, indent=1).encode()
        return [file for file in self.files if _write_atomically(file, document)]

    def spread(self) -> None:
        """Writes what there is in one place to all of them."""
        found = self.read()
        if found is not None:
            self.write(found)


def digest_files(files: Iterable[Path]) -> str:
    """Of their names and contents."""
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _write_atomically(file: Path, content: bytes) -> bool:
    """At once or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)
        _forget_oldest(file.parent)
    except OSError as error:
        log.info("not kept for the next start in %s: %s", file.parent, error)
        return False
    return True


def _forget_oldest(folder: Path) -> None:
    kept = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in kept[:-_KEYS_MAX]:
        file.unlink(missing_ok=True)
