"""How a kernel finds its part of a packed step (engine/step/layout.py) from the array's address alone."""

import triton
import triton.language as tl

from engine.step.layout import OFFSET_WORD, Section

ROWS = tl.constexpr(0)  # count words of the header
SLICES = tl.constexpr(1)
TABLE_WIDTH = tl.constexpr(2)
SAMPLED = tl.constexpr(3)

TOKENS = tl.constexpr(OFFSET_WORD + Section.TOKENS)  # header words that hold a section's first word
POSITIONS = tl.constexpr(OFFSET_WORD + Section.POSITIONS)
SLOTS = tl.constexpr(OFFSET_WORD + Section.SLOTS)
TABLES = tl.constexpr(OFFSET_WORD + Section.TABLES)
LOGITS_ROWS = tl.constexpr(OFFSET_WORD + Section.ROWS)
SAMPLING = tl.constexpr(OFFSET_WORD + Section.SAMPLING)
HISTORY_STARTS = tl.constexpr(OFFSET_WORD + Section.HISTORY_STARTS)
HISTORY = tl.constexpr(OFFSET_WORD + Section.HISTORY)
BIAS_STARTS = tl.constexpr(OFFSET_WORD + Section.BIAS_STARTS)
BIAS_IDS = tl.constexpr(OFFSET_WORD + Section.BIAS_IDS)
BIAS_VALUES = tl.constexpr(OFFSET_WORD + Section.BIAS_VALUES)


@triton.jit
def word(step, section, index):
    """Word `index` of the section whose first word is in header word `section`."""
    return tl.load(step + tl.load(step + section) + index)
