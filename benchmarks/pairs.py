"""One benchmark in two checkouts, in turns, and each figure's median in both. It measures nothing itself.

The row whose peer is a commit is that commit's; the row without a peer is this checkout's.

python -m benchmarks.pairs --before ../before --old benchmarks.quota --new benchmarks.tenants.quota -- --rounds 3
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

from benchmarks.record import record

ROOT: Final = Path(__file__).parents[1]
# As benchmarks.record prints them: a name, a shape in 50 columns or more, a value and its unit.
_FIGURE: Final = re.compile(r"^.{12} (?P<shape>.{50}|.{51,}?) (?P<value>[\d.]+(?:e[+-]?\d+)?) (?P<unit>\S+)(?:   .*)?$")

Figures = dict[tuple[str, str], list[float]]  # (shape, unit) → values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--old", required=True, help="the benchmark's module there")
    parser.add_argument("--new", required=True, help="the benchmark's module here")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--only", default="", help="keep figures whose shape this regular expression finds")
    parser.add_argument("arguments", nargs="*", help="behind --, for both")
    options = parser.parse_args()
    before: Figures = defaultdict(list)
    after: Figures = defaultdict(list)
    for _ in range(options.rounds):
        run(options.before, options.old, options.arguments, before)
        run(ROOT, options.new, options.arguments, after)
    there = commit_of(options.before)
    for (shape, unit), values in after.items():
        if (shape, unit) in before and re.search(options.only, shape):
            old, new = statistics.median(before[shape, unit]), statistics.median(values)
            record("house", shape, old, unit, peer=there)
            record("house", shape, new, unit)
            print(f"{'':12} {new / old:.3f} of {there}" if old else "")


def run(folder: Path, module: str, arguments: list[str], figures: Figures) -> None:
    """Runs `module` in `folder`, its packages first, and adds what it prints to `figures`."""
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
    command = [sys.executable, "-m", module, *arguments]
    printed = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in printed.splitlines():
        if figure := _FIGURE.match(line):
            figures[figure["shape"].strip(), figure["unit"]].append(float(figure["value"]))


def commit_of(folder: Path) -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
    )
    return asked.stdout.strip()


if __name__ == "__main__":
    main()
