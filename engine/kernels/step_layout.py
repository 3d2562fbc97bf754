"""How a kernel finds its part of a step's words (engine/step/layout.py) from the array's address alone."""

import triton
import triton.language as tl

from engine.step.layout import EMBEDDING_TOKEN, OFFSET_WORD, SAMPLING_WORDS, Count, Section

ROWS = tl.constexpr(int(Count.TOKENS))  # count words of the header
SAMPLED = tl.constexpr(int(Count.ROWS))

TOKENS = tl.constexpr(OFFSET_WORD + Section.TOKENS)  # header words that hold a section's first word
POSITIONS = tl.constexpr(OFFSET_WORD + Section.POSITIONS)
LOGITS_ROWS = tl.constexpr(OFFSET_WORD + Section.ROWS)
SAMPLING = tl.constexpr(OFFSET_WORD + Section.SAMPLING)
HISTORIES = tl.constexpr(OFFSET_WORD + Section.HISTORIES)
HISTORY = tl.constexpr(OFFSET_WORD + Section.HISTORY)
BIAS_STARTS = tl.constexpr(OFFSET_WORD + Section.BIAS_STARTS)
BIAS_IDS = tl.constexpr(OFFSET_WORD + Section.BIAS_IDS)
BIAS_VALUES = tl.constexpr(OFFSET_WORD + Section.BIAS_VALUES)

EMBEDDED = tl.constexpr(EMBEDDING_TOKEN)  # the first token that is a row of a buffer
_WORDS = tl.constexpr(SAMPLING_WORDS)
TEMPERATURE = tl.constexpr(0)  # words of a row's sampling settings
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
REPETITION = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
SEED_LOW = tl.constexpr(7)
SEED_HIGH = tl.constexpr(8)
SEED_POSITION = tl.constexpr(9)
MASK = tl.constexpr(11)
_TEMPERATURE_MIN = tl.constexpr(1e-10)  # as in engine/step/sampling.py


@triton.jit
def word(step, section, index):
    """Word `index` of the section whose first word is in header word `section`."""
    return tl.load(step + tl.load(step + section) + index)


@triton.jit
def sampling_word(step, row, column):
    """One of the row's sampling settings, as int32."""
    return word(step, SAMPLING, row * _WORDS + column)


@triton.jit
def sampling_float(step, row, column):
    """One of the row's sampling settings, as float32."""
    return sampling_word(step, row, column).to(tl.float32, bitcast=True)


@triton.jit
def sampling_scale(step, row):
    """1 ÷ temperature; 0 where the row is greedy."""
    temperature = sampling_float(step, row, TEMPERATURE)
    return tl.where(temperature > 0, 1 / tl.maximum(temperature, _TEMPERATURE_MIN), 0.0)
