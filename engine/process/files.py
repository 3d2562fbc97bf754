"""Files that other processes see whole or not at all. It knows no formats."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` beside `path`, readable by this user alone, and moves it there once it is on the disk.

    The folder exists. Raises OSError; then `path` is as it was, and nothing is left beside it.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as unfinished:
        try:
            unfinished.write(content)
            unfinished.flush()
            os.fsync(unfinished.fileno())
            os.replace(unfinished.name, path)
        except BaseException:
            os.unlink(unfinished.name)
            raise
