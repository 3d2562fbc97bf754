"""Benchmarks are run from the checkout, and are no part of what is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
