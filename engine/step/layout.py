"""One step's work as one flat int32 array, and back. It does not know why these slices were chosen.

The array is what travels to every rank and to the device in one copy. Sections follow each other in the order of
`Section`. The header says how long each is and where it starts, so that a kernel finds what it needs from the array's
address alone. Floats travel as their bits.

    word 0 … 7    the counts T, S, W, R, H, B, G, M
    word 8 … 23   the first word of each Section, in its order
    word 24 … 31  left to whoever appends to the array (engine/step/attention_plan.py)

    header | tokens_T | positions_T | slots_T | query_starts_S+1 | contexts_S | tables_SxW | rows_R |
    sampling_Rx12 | history_starts_R+1 | history_H | bias_starts_R+1 | bias_ids_B | bias_values_B |
    own_starts_S | segments_Gx4 | members_M

A token −1−r, among the tokens and in the history, is the one that row r of the step before this one sampled: a step
may be packed and launched while that is still being computed. What a masked row may become is told by a bit mask that
comes later, when the tokens before it are known: bit (id % 32) of word (id ÷ 32) is 1 where a token is allowed.

Segments are what prefix groups are made of: keys that several slices of one namespace have in common, each a range of
keys in the blocks of one of them. The segments of a slice and its keys from own_starts on are its whole context.

T tokens in the step, S slices, W blocks in the widest table, R rows to sample, H history tokens, B biases,
G segments, M their members.
"""

import enum
import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.protocol.types import SamplingParams

Int32s = NDArray[np.int32]
HEADER_WORDS = 32
OFFSET_WORD = 8  # where the header keeps the first word of Section 0
SPARE_WORD = 24
SEGMENTS_MAX: Final = 4  # of one slice
# A row of `sampling_R`: fields of SamplingParams; the position that the sampled token will have, which with the seed
# keys the random numbers; how many alternatives to report, −1: none; and which of the step's masks applies, in the
# order of their rows, −1: none does.
SAMPLING: Final = np.dtype(
    [
        *(("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("min_p", "<f4")),
        *(("repetition_penalty", "<f4"), ("frequency_penalty", "<f4"), ("presence_penalty", "<f4"), ("seed", "<i8")),
        *(("position", "<i4"), ("logprobs", "<i4"), ("mask", "<i4")),
    ]
)
SAMPLING_WORDS: Final = SAMPLING.itemsize // 4
_SAMPLING_ROW: Final = struct.Struct("<fifffffqiii")  # the same, to pack by


class Section(enum.IntEnum):
    """The sections of a packed array, in their order; header word OFFSET_WORD + section is its first word."""

    TOKENS = 0
    POSITIONS = 1
    SLOTS = 2
    QUERY_STARTS = 3
    CONTEXTS = 4
    TABLES = 5
    ROWS = 6
    SAMPLING = 7
    HISTORY_STARTS = 8
    HISTORY = 9
    BIAS_STARTS = 10
    BIAS_IDS = 11
    BIAS_VALUES = 12
    OWN_STARTS = 13
    SEGMENTS = 14
    MEMBERS = 15


class SequenceSlice(msgspec.Struct, frozen=True):
    """A run of one sequence's tokens in a step.

    tokens      the ids to compute, positions start … start+len−1; all KV before `start` is already written, or is by
                the step before. The last may be −1−r: what row r of that step samples.
    blocks      the sequence's block table, covering at least start+len(tokens) positions.
    sampling    None while the prompt is not finished; else how to sample the token after the last one.
    history     (ids of prompt and output so far, number of them that are prompt) where penalties need them; a token
                that is not known yet is added by `pack`.
    masked      a mask says which tokens may be sampled.
    """

    tokens: Items[int]
    start: int
    blocks: Items[int] | Int32s
    sampling: SamplingParams | None = None
    history: tuple[Items[int], int] | None = None
    masked: bool = False


class PrefixSegment(msgspec.Struct, frozen=True):
    """Keys first … last−1 that all members read from the same blocks: those of members[0]'s table.

    `members` are indices of slices, two or more. A slice's segments follow each other from key 0 without a gap, and it
    has keys after the last of them. first and last are multiples of the block size.
    """

    members: Items[int]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What an executor can run.

    context_tokens      positions lie below it.
    vocabulary          tokens lie below it.
    blocks              tables name blocks below it; 0 without a KV cache.
    step_tokens         the most rows of a step in which some sequence decodes,
    prompt_step_tokens  and of one in which none does.
    sequences           how many may run at once.
    depth               steps that may be in flight at once: 1, or 2 where launching does not wait for the step.
    """

    context_tokens: int
    vocabulary: int
    blocks: int
    step_tokens: int
    prompt_step_tokens: int
    sequences: int
    depth: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Views into the packed array, in the order of Section; nothing is copied. The letters are those of the module's
    drawing."""

    tokens_T: Int32s
    positions_T: Int32s
    slots_T: Int32s  # block · block_tokens + offset: where each token's K and V are written
    query_starts_S1: Int32s
    contexts_S: Int32s  # tokens of KV each slice attends to, its own included
    tables_SW: Int32s  # padded with 0
    rows_R: Int32s  # index into T of the rows whose next token is sampled
    sampling_R: NDArray[np.void]  # of dtype SAMPLING
    history_starts_R1: Int32s
    history_H: Int32s  # per row: its prompt length, then prompt and output ids; empty without penalties
    bias_starts_R1: Int32s
    bias_ids_B: Int32s
    bias_values_B: NDArray[np.float32]
    own_starts_S: Int32s  # the first key of each slice that lies in no segment
    segments_G4: Int32s  # slice whose table has the keys, first key, last key, where its members end in members_M
    members_M: Int32s  # slices

    @property
    def masked(self) -> bool:
        """Whether a row has a mask."""
        return bool((self.sampling_R["mask"] >= 0).any())


def _sampling_row(sampling: SamplingParams) -> bytes:
    """A row of `sampling_R` without its position and its mask; it depends on `sampling` alone."""
    logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    return _SAMPLING_ROW.pack(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
        sampling.frequency_penalty, sampling.presence_penalty, sampling.seed, 0, logprobs, -1,
    )  # fmt: skip


def pack_step(slices: Items[SequenceSlice], block_tokens: int, segments: Items[PrefixSegment] = ()) -> Int32s:
    """Packs the slices' step into one array that `unpack_step` reads; nothing of it is shared with the slices.

    Rows to sample keep the order of their slices. Costs a few microseconds per slice and a copy of its table.
    """
    assert slices, "a step without slices"
    sampled = [item for item in slices if item.sampling is not None]
    histories = [_history_words(item) for item in sampled]
    biases = [item.sampling.logit_bias for item in sampled if item.sampling is not None]
    lengths_S = np.array([len(item.tokens) for item in slices], np.int32)
    widths_S = [len(item.blocks) for item in slices]
    history_lengths, bias_lengths = [len(words) for words in histories], [len(bias) for bias in biases]
    t, s, w, r = int(lengths_S.sum()), len(slices), max(widths_S), len(sampled)
    members = sum(len(segment.members) for segment in segments)
    counts = (t, s, w, r, sum(history_lengths), sum(bias_lengths), len(segments), members)
    ends = np.cumsum([HEADER_WORDS, *_lengths(counts)])
    packed = np.zeros(ends[-1], np.int32)
    packed[: len(counts)] = counts
    packed[OFFSET_WORD:SPARE_WORD] = ends[:-1]
    batch = unpack_step(packed)

    starts_S = np.array([item.start for item in slices], np.int32)
    ends_S = np.cumsum(lengths_S, dtype=np.int32)
    batch.query_starts_S1[1:] = ends_S
    batch.contexts_S[:] = contexts_S = starts_S + lengths_S
    assert lengths_S.min() > 0, "a slice computes at least one token"
    assert starts_S.min() >= 0, "a slice starts before its sequence"
    assert (contexts_S <= np.array(widths_S) * block_tokens).all(), "a block table shorter than its tokens"
    for row_W, width, item in zip(batch.tables_SW, widths_S, slices, strict=True):
        row_W[:width] = item.blocks

    batch.tokens_T[:] = np.fromiter(chain.from_iterable([item.tokens for item in slices]), np.int32, t)
    batch.positions_T[:] = np.arange(t, dtype=np.int32) + np.repeat(contexts_S - ends_S, lengths_S)
    block_T, offset_T = np.divmod(batch.positions_T, np.int32(block_tokens))
    batch.slots_T[:] = batch.tables_SW[np.repeat(np.arange(s), lengths_S), block_T] * block_tokens + offset_T

    picked_S = np.fromiter([item.sampling is not None for item in slices], np.bool_, s)
    batch.rows_R[:] = ends_S[picked_S] - 1
    if r:
        words = b"".join([_sampling_row(item.sampling) for item in sampled if item.sampling is not None])
        batch.sampling_R.view(np.int32)[:] = np.frombuffer(words, np.int32)
        batch.sampling_R["position"] = contexts_S[picked_S]
        masked = [row for row, item in enumerate(sampled) if item.masked]
        batch.sampling_R["mask"][masked] = np.arange(len(masked))
    np.cumsum(history_lengths, out=batch.history_starts_R1[1:])
    np.cumsum(bias_lengths, out=batch.bias_starts_R1[1:])
    if counts[4]:
        np.concatenate(histories, out=batch.history_H)
    if counts[5]:
        batch.bias_ids_B[:] = list(chain.from_iterable(biases))
        batch.bias_values_B[:] = list(chain.from_iterable(bias.values() for bias in biases))
    if segments:
        _write_segments(batch, segments)
    return packed


def _write_segments(batch: StepBatch, segments: Items[PrefixSegment]) -> None:
    end = 0
    for row_4, segment in zip(batch.segments_G4, segments, strict=True):
        assert len(segment.members) > 1, "a segment of one"
        start, end = end, end + len(segment.members)
        batch.members_M[start:end] = segment.members
        row_4[:] = segment.members[0], segment.first, segment.last, end
    for row_4, segment in sorted(zip(batch.segments_G4, segments, strict=True), key=lambda pair: pair[1].first):
        members = np.asarray(segment.members)
        assert (batch.own_starts_S[members] == row_4[1]).all(), "a gap before a segment"
        batch.own_starts_S[members] = row_4[2]
    assert (batch.own_starts_S < batch.contexts_S).all(), "a slice without keys of its own"


_NO_HISTORY: Final = np.empty(0, np.int32)


def _history_words(item: SequenceSlice) -> Int32s:
    if item.history is None:
        return _NO_HISTORY
    ids, prompt_tokens = item.history
    unknown = item.tokens[-1] < 0
    words = np.empty(1 + len(ids) + unknown, np.int32)
    words[0], words[1 : 1 + len(ids)] = prompt_tokens, ids
    if unknown:
        words[-1] = item.tokens[-1]
    return words


def _lengths(counts: Items[int]) -> list[int]:
    t, s, w, r, h, b, g, m = counts
    return [t, t, t, s + 1, s, s * w, r, r * SAMPLING_WORDS, r + 1, h, r + 1, b, b, s, 4 * g, m]


def unpack_step(packed: Int32s) -> StepBatch:
    """Views of a packed array (int32, contiguous); the result holds as long as the array is not written.

    Words behind the last section are ignored.
    """
    assert packed.dtype == np.int32
    assert packed.ndim == 1
    assert len(packed) >= HEADER_WORDS
    lengths = _lengths(packed[:OFFSET_WORD].tolist())
    starts = packed[OFFSET_WORD:SPARE_WORD].tolist()
    assert starts[-1] + lengths[-1] <= len(packed), f"{len(packed)} words, header says {starts[-1] + lengths[-1]}"
    parts: list[NDArray[Any]] = [packed[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    parts[Section.TABLES] = parts[Section.TABLES].reshape(-1, int(packed[2]))
    parts[Section.SAMPLING] = parts[Section.SAMPLING].view(SAMPLING)
    parts[Section.BIAS_VALUES] = parts[Section.BIAS_VALUES].view(np.float32)
    parts[Section.SEGMENTS] = parts[Section.SEGMENTS].reshape(-1, 4)
    return StepBatch(*parts)


def check_step(batch: StepBatch, limits: ExecutorLimits) -> None:
    """Asserts that a step names no position, token or block that its executor has not. Costs some 10 µs."""
    assert batch.positions_T.max() < limits.context_tokens, "a position past the context"
    assert batch.tokens_T.max() < limits.vocabulary, "a token past the vocabulary"
    assert 0 <= batch.tables_SW.min() <= batch.tables_SW.max() < limits.blocks, "a block past the pool"
