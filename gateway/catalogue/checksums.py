"""Files of a folder against the SHA-256 sums that lie beside them, in the file that coreutils' `sha256sum` writes and
reads. It knows nothing of what is in the files.
"""

import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final

SUMS_NAME: Final = "SHA256SUMS"
_LINE: Final = re.compile(r"(\\?)([0-9A-Fa-f]{64}) [ *](.+)")
_READ_BYTES: Final = 4 << 20
_THREADS_MAX: Final = 8


class ChecksumError(ValueError):
    """A file is not what its sum says, or the sums cannot be read; the message names the file."""


def read_sums(folder: Path) -> dict[str, str]:
    """Names below the folder → sums in lower case; empty where it has none. Raises ChecksumError."""
    path = folder / SUMS_NAME
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other ends of lines may be in names
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ChecksumError(f"{path} cannot be read: {error}") from error
    sums = dict(_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    sums.pop(SUMS_NAME, None)  # what `*` has of an older one is no sum of this one
    return sums


def _parsed(path: Path, number: int, line: str) -> tuple[str, str]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ChecksumError(f"{path}: line {number} is none of sha256sum's: 64 hex digits, two spaces, a name")
    escaped, sum_, text = match.groups()
    if escaped:
        text = re.sub(r"\\(.)", lambda pair: "\n" if pair[1] == "n" else pair[1], text)
    name = PurePosixPath(text)
    if name.is_absolute() or ".." in name.parts:
        raise ChecksumError(f"{path}: line {number} names {str(name)!r}, which is not below the folder")
    return str(name), sum_.lower()


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    (folder / SUMS_NAME).write_text("".join(f"{sum_}  {name}\n" for name, sum_ in sorted(sums.items())))


def require_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Reads every file that has a sum, several at once, with a bar where stderr is a terminal. Raises ChecksumError for
    the first that is missing or another one; then the others are read no further."""
    from tqdm import tqdm  # only here: its import is a tenth of what an agent waits for to read settings

    sizes = {name: _size(folder / name) for name in sums}
    ending = threading.Event()
    with (
        tqdm(total=sum(sizes.values()), desc="checking", unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        as bar,
        ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1)) as pool,
    ):  # fmt: skip
        counted = threading.Lock()

        def read(count: int) -> bool:
            with counted:
                bar.update(count)
            return not ending.is_set()

        largest_first = sorted(sums, key=lambda name: -sizes[name])
        sums_read = [(name, pool.submit(sum_file, folder / name, read)) for name in largest_first]
        try:
            for name, future in sums_read:
                if future.result() != sums[name]:
                    raise ChecksumError(
                        f"{folder / name} is damaged: its SHA-256 begins with {future.result()[:12]}, "
                        f"{SUMS_NAME} says {sums[name][:12]}: get the file again"
                    )
        finally:
            ending.set()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ChecksumError(f"{path}, which {SUMS_NAME} names, cannot be read: {error.strerror}") from error


def sum_file(path: Path, read: Callable[[int], bool]) -> str:
    """The SHA-256 of a file, in hex. Reading stops where `read`, which is told each number of bytes, returns false.
    Raises ChecksumError."""
    digest, memory = hashlib.sha256(), bytearray(_READ_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while (count := file.readinto(memory)) and read(count):
                digest.update(memoryview(memory)[:count])
    except OSError as error:
        raise ChecksumError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
