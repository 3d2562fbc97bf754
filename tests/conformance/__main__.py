"""Prints the conformance table of all official SDKs, and ends with 1 where a row fails.

Usage: python -m tests.conformance
"""

import sys
import tempfile
from pathlib import Path

from tests.conformance import node_sdks, python_sdks
from tests.conformance.row import summary, table
from tests.conformance.server import target


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, target(Path(folder)) as at:
        rows = [*python_sdks.rows(at), *node_sdks.rows(at)]
    print(table(rows))
    print(summary(rows))
    return int(any(row.outcome == "fail" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
