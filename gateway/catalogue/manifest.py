"""The files of a model as hosts of a cluster name them: by name, size and SHA-256. What is taken from others is checked
here before a path is made of it. It opens files only to sum them up.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gateway.catalogue.checksums import sum_file
from gateway.images.vision import VISION_FILES
from tenants.records.catalogue import CatalogueFile, CatalogueModel

FILES_MAX: Final = 512  # of a model
MODEL_BYTES_MAX: Final = 4 << 40
TEXT_BYTES_MAX: Final = 256 << 20  # of a file that is no weights: gateways read it whole
# What of a folder a gateway's model is read from.
READ_FILES: Final = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *VISION_FILES,
)
_SUMMED_FILES: Final = ("special_tokens_map.json", "chat_template.json")  # of which replicas of one model are to agree
_WEIGHTS: Final = ".safetensors"
_INDEX: Final = "model.safetensors.index.json"
_NAME: Final = re.compile(r"(?=.{1,120}$)[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json|jinja)")
_BELOW: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}/config\.json")  # of a module, as encoders have them
_SUM: Final = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """Files that make no model; the message says which and why."""


def require_manifest(model: CatalogueModel) -> None:
    """Accepts a model without files, which each host has by itself. Raises ManifestError for files that no host may
    take: names that lead out of the folder or are no model's, sums that are none, sizes over a limit."""
    if files := model.files:
        _require_files(files)


def _require_files(files: Sequence[CatalogueFile]) -> None:
    if len(files) > FILES_MAX:
        raise ManifestError(f"it has {len(files)} files, and a model has {FILES_MAX} at the most")
    if len({file.name.casefold() for file in files}) < len(files):
        raise ManifestError("it names a file twice")
    for file in files:
        if not (_NAME.fullmatch(file.name) or _BELOW.fullmatch(file.name)):
            raise ManifestError(f"{file.name!r} is no file of a model: weights (.safetensors), .json and .jinja are")
        if not _SUM.fullmatch(file.sha256):
            raise ManifestError(f"{file.name} has no SHA-256 of 64 hex digits")
        most = MODEL_BYTES_MAX if is_weights(file) else TEXT_BYTES_MAX
        if not 0 <= file.bytes <= most:
            raise ManifestError(f"{file.name} is said to have {file.bytes} bytes, and may have {most} at the most")
    if sum(file.bytes for file in files) > MODEL_BYTES_MAX:
        raise ManifestError(f"its files have more than {MODEL_BYTES_MAX} bytes together")
    if "config.json" not in {file.name for file in files}:
        raise ManifestError("it has no config.json")


def is_weights(file: CatalogueFile) -> bool:
    return file.name.endswith(_WEIGHTS)


def text_files(files: Iterable[CatalogueFile]) -> list[CatalogueFile]:
    """The files that a gateway reads: all but the weights."""
    return [file for file in files if not is_weights(file)]


def manifest_digest(files: Iterable[CatalogueFile]) -> str:
    """A name for these files, which differs where a name or a sum does."""
    listed = sorted((file.name, file.sha256) for file in files)
    return hashlib.sha256(msgspec.json.encode(listed)).hexdigest()[:32]


def read_manifest(folder: Path, read: Callable[[int], bool]) -> list[CatalogueFile]:
    """The files of a folder that its model needs. Reads all of them, and tells `read` how many bytes at a time. Raises
    ManifestError and ChecksumError."""
    names = [name for name in _needed(folder) if (folder / name).is_file()]
    sizes = {name: (folder / name).stat().st_size for name in names}
    files = [CatalogueFile(name, sizes[name], sum_file(folder / name, read)) for name in names]
    _require_files(files)
    return files


def manifest_bytes(folder: Path) -> int:
    """How much `read_manifest` will read."""
    return sum((folder / name).stat().st_size for name in _needed(folder) if (folder / name).is_file())


def _needed(folder: Path) -> list[str]:
    modules = sorted(f"{path.parent.name}/config.json" for path in folder.glob("*/config.json"))
    weights = sorted(path.name for path in folder.glob(f"*{_WEIGHTS}"))
    if (folder / _INDEX).is_file():  # some folders hold their weights twice
        try:
            named = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{folder / _INDEX} cannot be read: {error}") from error
        weights = [name for name in weights if name in named]
    return [*READ_FILES, *_SUMMED_FILES, *(module for module in modules if _BELOW.fullmatch(module)), _INDEX, *weights]
