"""Overwrites what is kept of objects that are no longer used. It does not know what was in them."""

import gc
from typing import Final

import numpy as np

_FREE_LIST_LENGTH: Final = 7  # freed arrays of each size that numpy keeps for the next ones,
_FREE_LIST_BYTES: Final = 1024  # where they are smaller than this


def overwrite_freed_objects() -> None:
    """Frees what refers to itself, takes all arrays that are kept, zeroed, and gives them back. Costs some 2 ms."""
    gc.collect()
    for size in range(4, _FREE_LIST_BYTES, 4):  # token ids have four bytes or eight
        _ = [np.zeros(size, np.uint8) for _ in range(_FREE_LIST_LENGTH)]
