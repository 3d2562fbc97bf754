"""numpy's freed arrays are overwritten: shown by what it gives out next."""

import numpy as np

from engine.memory.scrub import overwrite_freed_objects


def freed() -> None:
    for words in (3, 17, 255):
        _ = [np.full(words, 0x5EC4E7, np.uint32) for _ in range(7)]


def given_out() -> int:
    """How many of the next arrays hold what was freed."""
    arrays = [np.empty(words, np.uint32) for words in (3, 17, 255) for _ in range(7)]
    return sum(int((array == 0x5EC4E7).all()) for array in arrays)


def test_small_arrays_that_numpy_keeps_are_overwritten() -> None:
    freed()
    assert given_out() == 21, "the control: it keeps them"
    freed()
    overwrite_freed_objects()
    assert given_out() == 0
