"""Measurements of kernels, a table per GPU beside this file. It needs neither GPU nor kernel to be read.

"6144x4096"              outputs × inputs of a weight: its tiling for some numbers of rows (buckets), null: cuBLAS
"28672x4096 gated"       the same with silu · up between its halves in the kernel
"6144x4096 bf12"         the same for a weight in 12 bits a number: the kernel's module before its tiling's numbers;
                         null: expanded, then cuBLAS
"6144x4096 fp8"          the same for a weight in 8 bits a number: which kernel, and its numbers (fp8/tuning.py); with
"28672x4096 gated fp8"   gated before it only a kernel that gates is one, else the product is gated behind
"6144x4096 bf12 / bf16"  the time that 12 bits take there ÷ the time of bf16
"""

import json
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

_TABLES: Final = Path(__file__).parent / "tables"
_DECODE_ROWS_MAX: Final = 64  # above it reading weights is less and less of a step's time


def table_path(gpu: str) -> Path:
    return _TABLES / f"{gpu}.json"


@cache
def load_table(gpu: str) -> dict[str, dict[str, Any]]:
    """Key → bucket → a tiling or null, or a ratio."""
    path = table_path(gpu)
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return table


def tiling_key(outputs: int, inputs: int, gated: bool, is_bf12: bool) -> str:
    return f"{outputs}x{inputs}{' gated' if gated else ''}{' bf12' if is_bf12 else ''}"


def fp8_key(outputs: int, inputs: int, gated: bool) -> str:
    return f"{tiling_key(outputs, inputs, gated, False)} fp8"


def ratio_key(outputs: int, inputs: int, gated: bool) -> str:
    return f"{tiling_key(outputs, inputs, gated, True)} / bf16"


def bf12_pays_off(outputs: int, inputs: int, gated: bool) -> bool:
    """Whether every measured GPU multiplies few rows by such a weight in 12 bits as fast as in bf16, in the mean of the
    measured numbers of rows. A single number of rows may be slower: the others, and a quarter of the memory, are worth
    more."""
    for path in _TABLES.glob("*.json"):
        ratios = load_table(path.stem).get(ratio_key(outputs, inputs, gated), {})
        few = [ratio for bucket, ratio in ratios.items() if int(bucket) <= _DECODE_ROWS_MAX]
        if few and fmean(few) > 1:
            return False
    return True
