"""What was measured of kernels on some GPU: a table per GPU, beside this file. It knows no GPU and no kernel: what runs
without either can read it.

    "6144x4096"              outputs × inputs of a weight: its tiling for some numbers of rows (buckets), null: cuBLAS
    "28672x4096 gated"       the same with silu · up between its halves in the kernel
    "6144x4096 bf12"         the same for a weight in 12 bits a number: the kernel's module before its tiling's numbers;
                             null: expanded, then cuBLAS
    "6144x4096 bf12 / bf16"  the time that 12 bits take there ÷ the time of bf16
"""

import json
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

_TABLES: Final = Path(__file__).parent / "tables"
_DECODE_ROWS_MAX: Final = 64  # above it a step's time is less and less that of reading weights


def table_path(gpu: str) -> Path:
    return _TABLES / f"{gpu}.json"


@cache
def load_table(gpu: str) -> dict[str, dict[str, Any]]:
    """Key → bucket → a tiling or null, or a ratio."""
    path = table_path(gpu)
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return table


def tiling_key(outputs: int, inputs: int, gated: bool, coded: bool) -> str:
    return f"{outputs}x{inputs}{' gated' if gated else ''}{' bf12' if coded else ''}"


def ratio_key(outputs: int, inputs: int, gated: bool) -> str:
    return f"{tiling_key(outputs, inputs, gated, True)} / bf16"


def bf12_pays_off(outputs: int, inputs: int, gated: bool) -> bool:
    """Whether no GPU is known to multiply few rows slower by such a weight in 12 bits than by one in bf16, in the mean
    of the numbers of rows that were measured. Of these alone one may be slower: what all the others win, and a quarter
    of the memory, is worth more."""
    for path in _TABLES.glob("*.json"):
        ratios = load_table(path.stem).get(ratio_key(outputs, inputs, gated), {})
        few = [ratio for bucket, ratio in ratios.items() if int(bucket) <= _DECODE_ROWS_MAX]
        if few and fmean(few) > 1:
            return False
    return True
