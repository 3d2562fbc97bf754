"""The house's own figures: how large it is, how soon `hearth` helps, and how soon it serves.

python -m benchmarks.house
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.record import record

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("engine", "gateway", "tenants", "prefixcache")
READY: Final = re.compile(r"is ready after")
START_S: Final = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind (default: 5)")
    options = parser.parse_args()
    files = {
        path: len(path.read_text().splitlines()) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))
    }
    record("house", "lines of the product", sum(files.values()), "lines", bound=48_000)
    record("house", "lines of its largest file", max(files.values()), "lines", bound=450)
    helped = statistics.median(help_s() for _ in range(options.rounds))
    record("house", "hearth --help", helped, "s", bound=0.3)
    ready = statistics.median(ready_s() for _ in range(options.rounds))
    record("house", "hearth serve, in a folder that has served before, until it is ready", ready, "s", bound=4.0)


def help_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gateway.cli", "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def ready_s() -> float:
    """Seconds from the command to the line that says that the built-in model serves, at the second start."""
    with tempfile.TemporaryDirectory() as folder:
        _until_ready(folder)
        return _until_ready(folder)


def _until_ready(folder: str) -> float:
    command = [sys.executable, "-u", "-m", "gateway.cli", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as serving:
        assert serving.stdout is not None
        try:
            for line in serving.stdout:
                if READY.search(line):
                    return time.perf_counter() - began
                assert time.perf_counter() - began < START_S, "it did not get ready"
        finally:
            serving.terminate()
            serving.wait(30)
    raise AssertionError("it ended before it was ready")


if __name__ == "__main__":
    main()
