"""What this host has of its cluster's catalogue, in a file that its keeper writes and others read."""

import contextlib
from pathlib import Path

import msgspec

from engine.process.files import replace_file
from tenants.records.catalogue import HostCatalogue

READY = "ready"
FETCHING = "fetching"
WAITING = "waiting"  # no host that answers has what is missing
FAILED = "failed"


def read_status(path: Path) -> HostCatalogue | None:
    """What the keeper wrote last; None where it wrote nothing that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=HostCatalogue)
    return None


def write_status(path: Path, status: HostCatalogue) -> None:
    """Raises OSError."""
    replace_file(path, msgspec.json.encode(status))
