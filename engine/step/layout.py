"""One step's work as one flat int32 array, and back. It does not know why these slices were chosen.

The array is what travels to every rank and to the device in one copy. Sections follow each other in the order of
`Section`. The header says how long each is and where it starts, so that a kernel finds what it needs from the array's
address alone. Floats travel as their bits.

    word 0         VERSION
    word 1 … 8     the counts T, S, G, R, H, B, N, M
    word 16 … 39   the first word of each Section, in its order
    word 40 … 63   for each group: the first words of its slots_T, of its tables_SW, its W, the first words of its
                   table_starts_S and of its attention plan (engine/step/attention_plan.py appends that), 0

    header | tokens_T | positions_T | query_starts_S+1 | contexts_S | adapters_S | rows_R | sampling_Rx12 |
    histories_Rx3 | history_H | bias_starts_R+1 | bias_ids_B | bias_values_B | own_starts_GxS | segments_Nx5 |
    members_M | slots_GxT | table_starts_GxS | tables_SxW of one group after the other

A group is layers that see alike and keep the same blocks. Where these see only what is near, a slice's table may begin
with a later block than the sequence: `table_starts` says with which one.

A token −1−r−(k<<20), among the tokens and in the history, is the one that row r of the step k+1 before this one
sampled: a step may be packed and launched while that is still being computed. A token EMBEDDING_TOKEN+e has row e of a
buffer as its embedding. What a masked row may become is told by a bit mask that comes later, when the tokens before it
are known: bit (id % 32) of word (id ÷ 32) is 1 where a token is allowed.

Segments are what prefix groups are made of: keys that several slices of one namespace have in common, each a range of
keys in the blocks of one of them. The segments of a slice in a group and its keys from own_starts on are its whole
context there; keys that its span hides are nobody's to read all the same.

T tokens in the step, S slices, G groups, W blocks in a group's widest table, R rows to sample, H history tokens,
B biases, N segments, M their members.
"""

import enum
import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.protocol.types import SamplingParams

Int32s = NDArray[np.int32]
Pages = NDArray[np.int64]  # blocks as they were taken once; see engine/kv_blocks/block_pool.py
VERSION: Final = 2
HEADER_WORDS = 64
OFFSET_WORD = 16  # where the header keeps the first word of Section 0
GROUPS_WORD = 40  # and what it says of group 0
GROUP_WORDS = 6
GROUPS_MAX: Final = 4
SEGMENTS_MAX: Final = 4  # of one slice in one group
EMBEDDING_TOKEN: Final = 1 << 30
_ROW_BITS: Final = 20  # of a token that is not known yet: the row that samples it
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


class Count(enum.IntEnum):
    """The header words that hold counts."""

    TOKENS = 1
    SLICES = 2
    GROUPS = 3
    ROWS = 4
    HISTORY = 5
    BIASES = 6
    SEGMENTS = 7
    MEMBERS = 8


class Section(enum.IntEnum):
    """The sections of a packed array, in their order; header word OFFSET_WORD + section is its first word."""

    TOKENS = 0
    POSITIONS = 1
    QUERY_STARTS = 2
    CONTEXTS = 3
    ADAPTERS = 4
    ROWS = 5
    SAMPLING = 6
    HISTORIES = 7
    HISTORY = 8
    BIAS_STARTS = 9
    BIAS_IDS = 10
    BIAS_VALUES = 11
    OWN_STARTS = 12
    SEGMENTS = 13
    MEMBERS = 14
    SLOTS = 15
    TABLE_STARTS = 16
    TABLES = 17


class GroupWord(enum.IntEnum):
    """What the header says of a group; `group_word` is where."""

    SLOTS = 0
    TABLES = 1
    TABLE_WIDTH = 2
    TABLE_STARTS = 3
    PLAN = 4


def group_word(group: int, word: GroupWord) -> int:
    """The header word that says this of the group."""
    return GROUPS_WORD + group * GROUP_WORDS + word


def awaited_token(row: int, steps_before: int = 1) -> int:
    """The token that stands for what this row of an earlier step samples; 1: of the step just before."""
    return -1 - row - (steps_before - 1 << _ROW_BITS)


def awaited_row(token: int) -> tuple[int, int]:
    """How many steps before its own such a token is sampled, and in which row: `awaited_token` backwards."""
    steps, row = divmod(-1 - token, 1 << _ROW_BITS)
    return 1 + steps, row


class EmbeddingSpan(msgspec.Struct, frozen=True):
    """Tokens first … first+count−1 of a slice whose embeddings are rows row … row+count−1 of the runner's buffer. What
    ids these tokens have does not matter."""

    first: int
    row: int
    count: int


class SequenceSlice(msgspec.Struct, frozen=True):
    """A run of one sequence's tokens in a step.

    tokens        the ids to compute, positions start … start+len−1; all KV before `start` is already written, or is by
                  the step before. The last may be an `awaited_token`.
    tables        the sequence's block table in each group, covering what its layers see of all positions up to
                  start+len(tokens).
    sampling      None while the prompt is not finished; else how to sample the tokens after the last ones.
    history       (ids of prompt and output up to the last of `tokens`, number of them that are prompt) where penalties
                  need them; a token that is not known yet is added by `pack_step`.
    masked        masks say which tokens may be sampled, one for each row.
    wanted        behind how many of the last tokens one is sampled.
    adapter       0: none.
    embeddings    which of the tokens are rows of a buffer.
    table_starts  the number of the block with which each table begins; none: all of them begin with the first.
    """

    tokens: Items[int]
    start: int
    tables: Items[Items[int] | Int32s]
    sampling: SamplingParams | None = None
    history: tuple[Items[int], int] | None = None
    masked: bool = False
    wanted: int = 1
    adapter: int = 0
    embeddings: Items[EmbeddingSpan] = ()
    table_starts: Items[int] = ()


class PrefixSegment(msgspec.Struct, frozen=True):
    """Keys first … last−1 that all members have in the same blocks, in the tables of one group.

    `members` are indices of slices, two or more. A slice's segments in a group follow each other from key 0 without a
    gap, and it has keys after the last of them. first and last are multiples of the block size.
    """

    members: Items[int]
    first: int
    last: int
    group: int = 0


Segment = tuple[int, int, int, Int32s]
"""Slice whose table has the keys, first key, last key, members."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Views into the packed array, in the order of Section; nothing is copied. The letters are those of the module's
    drawing."""

    tokens_T: Int32s
    positions_T: Int32s
    query_starts_S1: Int32s
    contexts_S: Int32s  # tokens of KV of each slice, its own included
    adapters_S: Int32s
    rows_R: Int32s  # index into T of the rows whose next token is sampled
    sampling_R: NDArray[np.void]  # of dtype SAMPLING
    histories_R3: (
        Int32s  # first and last index into H, how many of these are prompt; the two are equal without penalties
    )
    history_H: Int32s  # prompt and output ids
    bias_starts_R1: Int32s
    bias_ids_B: Int32s
    bias_values_B: NDArray[np.float32]
    own_starts_GS: Int32s  # the first key of each slice that lies in no segment
    segments_N5: (
        Int32s  # group, slice whose table has the keys, first key, last key, where its members end in members_M
    )
    members_M: Int32s  # slices
    slots_GT: Int32s  # block · block_tokens + offset: where each token's K and V are written
    table_starts_GS: Int32s  # the number of the first block in each table
    tables_GSW: tuple[Int32s, ...]  # each of its own width, padded with 0

    @property
    def masked(self) -> bool:
        """Whether a row has a mask."""
        return bool((self.sampling_R["mask"] >= 0).any())

    def segments(self, group: int) -> list[Segment]:
        """The group's segments."""
        found, start = [], 0
        for of_group, index, first, last, end in self.segments_N5.tolist():
            if of_group == group:
                found.append((index, first, last, self.members_M[start:end]))
            start = end
        return found


def pack_step(slices: Items[SequenceSlice], block_tokens: int, segments: Items[PrefixSegment] = ()) -> Int32s:
    """Packs the slices' step into one array that `unpack_step` reads; nothing of it is shared with the slices.

    Rows to sample keep the order of their slices. Costs a few microseconds per slice and a copy of its tables.
    """
    assert slices, "a step without slices"
    sampled = [item for item in slices if item.sampling is not None]
    wanted = [item.wanted for item in sampled]
    histories = [item for item in sampled if item.history is not None]
    biases = [item for item in sampled if item.sampling is not None and item.sampling.logit_bias]
    tables = [item.tables for item in slices]
    lengths_S = _int32s([len(item.tokens) for item in slices])
    counts = {
        Count.TOKENS: int(lengths_S.sum()),
        Count.SLICES: len(slices),
        Count.GROUPS: len(tables[0]),
        Count.ROWS: sum(wanted),
        Count.HISTORY: sum([_history_length(item) for item in histories]),
        Count.BIASES: sum([_bias_length(item) for item in biases]),
        Count.SEGMENTS: len(segments),
        Count.MEMBERS: sum([len(segment.members) for segment in segments]),
    }
    assert {*map(len, tables)} == {len(tables[0])}, "slices of unequally many groups"
    widths = [[len(each[group]) for each in tables] for group in range(len(tables[0]))]
    packed = empty_step(list(counts.values()), [max(each) for each in widths])
    batch = unpack_step(packed)
    _write_tokens(batch, slices, lengths_S)
    for index in [index for index, item in enumerate(slices) if item.adapter or item.embeddings or item.table_starts]:
        _write_special(batch, index, slices[index])
    _write_tables(batch, tables, widths, block_tokens)
    if wanted:
        _write_rows(batch, slices, sampled, wanted)
    if histories:
        _write_histories(batch, sampled)
    if biases:
        _write_biases(batch, sampled)
    if segments:
        _write_segments(batch, segments)
    return packed


def _int32s(values: list[int]) -> Int32s:
    return np.fromiter(values, np.int32, len(values))


def empty_step(counts: list[int], widths: list[int]) -> Int32s:
    """An empty step of this size, with its header."""
    assert 0 < len(widths) <= GROUPS_MAX
    *starts, end = accumulate(_lengths(counts, widths), initial=HEADER_WORDS)
    packed = np.zeros(end, np.int32)
    packed[: 1 + len(counts)] = VERSION, *counts
    packed[OFFSET_WORD : OFFSET_WORD + len(starts)] = starts
    t, s, *_ = counts
    tables = starts[Section.TABLES]
    for group, width in enumerate(widths):
        at = group_word(group, GroupWord.SLOTS)
        slots, table_starts = starts[Section.SLOTS] + group * t, starts[Section.TABLE_STARTS] + group * s
        packed[at : at + GroupWord.PLAN] = slots, tables, width, table_starts
        tables += s * width
    return packed


def _lengths(counts: list[int], widths: list[int]) -> list[int]:
    """How many words each section has."""
    t, s, g, r, h, b, n, m = counts
    rows = [r, r * SAMPLING_WORDS, 3 * r, h, r + 1, b, b]
    return [t, t, s + 1, s, s, *rows, g * s, 5 * n, m, g * t, g * s, s * sum(widths)]


def _write_tokens(batch: StepBatch, slices: Items[SequenceSlice], lengths_S: Int32s) -> None:
    starts_S = _int32s([item.start for item in slices])
    assert lengths_S.min() > 0, "a slice computes at least one token"
    assert starts_S.min() >= 0, "a slice starts before its sequence"
    ends_S, t = batch.query_starts_S1[1:], len(batch.tokens_T)
    np.cumsum(lengths_S, out=ends_S)
    np.add(starts_S, lengths_S, out=batch.contexts_S)
    batch.tokens_T[:] = np.fromiter(chain.from_iterable([item.tokens for item in slices]), np.int32, t)
    batch.positions_T[:] = np.arange(t, dtype=np.int32) + np.repeat(batch.contexts_S - ends_S, lengths_S)


def _write_special(batch: StepBatch, index: int, item: SequenceSlice) -> None:
    """Writes what few slices have: an adapter, embeddings of their own, tables that begin late."""
    batch.adapters_S[index] = item.adapter
    for span in item.embeddings:
        assert 0 <= span.first < span.first + span.count <= len(item.tokens), "embeddings past their slice"
        assert span.row >= 0, "embeddings before the buffer"
        first = batch.query_starts_S1[index] + span.first
        batch.tokens_T[first : first + span.count] = EMBEDDING_TOKEN + span.row + np.arange(span.count)
    if item.table_starts:
        batch.table_starts_GS[:, index] = item.table_starts


def _write_tables(
    batch: StepBatch, tables: list[Items[Items[int] | Int32s]], widths: list[list[int]], block_tokens: int
) -> None:
    """Copies the tables, and says where each token's K and V go."""
    slice_T = np.repeat(np.arange(len(tables)), np.diff(batch.query_starts_S1))
    number_T, offset_T = np.divmod(batch.positions_T, np.int32(block_tokens))
    first_S = number_T[batch.query_starts_S1[:-1]]
    for group, (table_SW, starts_S) in enumerate(zip(batch.tables_GSW, batch.table_starts_GS, strict=True)):
        for row_W, width, each in zip(table_SW, widths[group], tables, strict=True):
            row_W[:width] = each[group]
        ends_S = (starts_S + _int32s(widths[group])) * block_tokens
        assert (batch.contexts_S <= ends_S).all(), "a block table shorter than its tokens"
        assert (first_S >= starts_S).all(), "a block table that begins behind its tokens"
        batch.slots_GT[group] = table_SW[slice_T, number_T - starts_S[slice_T]] * block_tokens + offset_T


def _write_rows(
    batch: StepBatch, slices: Items[SequenceSlice], sampled: list[SequenceSlice], wanted: list[int]
) -> None:
    picked_S = np.fromiter([item.sampling is not None for item in slices], np.bool_, len(slices))
    wanted_I = _int32s(wanted)
    lengths_I = np.diff(batch.query_starts_S1)[picked_S]
    assert wanted_I.min() > 0, "a slice that samples no row"
    assert (wanted_I <= lengths_I).all(), "rows of another slice are wanted"
    shift_I = batch.query_starts_S1[1:][picked_S] - np.cumsum(wanted_I)
    batch.rows_R[:] = np.repeat(shift_I, wanted_I) + np.arange(len(batch.rows_R))
    words = [_sampling_row(item.sampling) for item in sampled if item.sampling is not None]
    if len(batch.rows_R) > len(words):
        words = [row * count for row, count in zip(words, wanted, strict=True)]
    batch.sampling_R.view(np.int32)[:] = np.frombuffer(b"".join(words), np.int32)
    batch.sampling_R["position"] = batch.positions_T[batch.rows_R] + 1
    if any(masked := [item.masked for item in sampled]):
        masked_R = np.flatnonzero(np.repeat(masked, wanted_I))
        batch.sampling_R["mask"][masked_R] = np.arange(len(masked_R))


def _sampling_row(sampling: SamplingParams) -> bytes:
    """A row of `sampling_R` without its position and its mask; it depends on `sampling` alone."""
    logprobs = -1 if sampling.logprobs is None else sampling.logprobs
    return _SAMPLING_ROW.pack(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
        sampling.frequency_penalty, sampling.presence_penalty, sampling.seed, 0, logprobs, -1,
    )  # fmt: skip


def _history_length(item: SequenceSlice) -> int:
    return 0 if item.history is None else len(item.history[0]) + (item.tokens[-1] < 0)


def _bias_length(item: SequenceSlice) -> int:
    return 0 if item.sampling is None else item.wanted * len(item.sampling.logit_bias)


def _write_histories(batch: StepBatch, sampled: list[SequenceSlice]) -> None:
    """Copies each slice's history once: that of a row ends where its token does."""
    row = end = 0
    for item in sampled:
        if item.history is not None:
            ids, prompt_tokens = item.history
            start, end = end, end + _history_length(item)
            batch.history_H[start : start + len(ids)] = ids
            if item.tokens[-1] < 0:
                batch.history_H[end - 1] = item.tokens[-1]
            assert end - start >= item.wanted, "a history shorter than its rows"
            for back in range(item.wanted):
                batch.histories_R3[row + back] = start, end + 1 + back - item.wanted, prompt_tokens
        row += item.wanted


def _write_biases(batch: StepBatch, sampled: list[SequenceSlice]) -> None:
    biases = [item.sampling.logit_bias for item in sampled if item.sampling is not None for _ in range(item.wanted)]
    np.cumsum([len(bias) for bias in biases], out=batch.bias_starts_R1[1:])
    batch.bias_ids_B[:] = list(chain.from_iterable(biases))
    batch.bias_values_B[:] = list(chain.from_iterable(bias.values() for bias in biases))


def _write_segments(batch: StepBatch, segments: Items[PrefixSegment]) -> None:
    end = 0
    for row_5, segment in zip(batch.segments_N5, segments, strict=True):
        assert len(segment.members) > 1, "a segment of one"
        start, end = end, end + len(segment.members)
        batch.members_M[start:end] = segment.members
        row_5[:] = segment.group, segment.members[0], segment.first, segment.last, end
    for segment in sorted(segments, key=lambda segment: segment.first):
        own_starts_S, members = batch.own_starts_GS[segment.group], np.asarray(segment.members)
        assert (own_starts_S[members] == segment.first).all(), "a gap before a segment"
        own_starts_S[members] = segment.last
    assert (batch.own_starts_GS < batch.contexts_S).all(), "a slice without keys of its own"


def unpack_step(packed: Int32s) -> StepBatch:
    """Views of a packed array (int32, contiguous); the result holds as long as the array is not written.

    Words behind the last section are ignored.
    """
    assert packed.dtype == np.int32
    assert packed.ndim == 1
    assert len(packed) >= HEADER_WORDS
    header = packed[:HEADER_WORDS].tolist()
    assert header[0] == VERSION, f"a packed step of version {header[0]}; this is {VERSION}"
    s, groups = header[Count.SLICES], header[Count.GROUPS]
    widths = [header[group_word(group, GroupWord.TABLE_WIDTH)] for group in range(groups)]
    lengths = _lengths(header[Count.TOKENS : Count.MEMBERS + 1], widths)
    starts = header[OFFSET_WORD : OFFSET_WORD + len(lengths)]
    assert starts[-1] + lengths[-1] <= len(packed), f"{len(packed)} words, header says {starts[-1] + lengths[-1]}"
    parts: list[Any] = [packed[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    parts[Section.SAMPLING] = parts[Section.SAMPLING].view(SAMPLING)
    parts[Section.HISTORIES] = parts[Section.HISTORIES].reshape(-1, 3)
    parts[Section.BIAS_VALUES] = parts[Section.BIAS_VALUES].view(np.float32)
    parts[Section.SEGMENTS] = parts[Section.SEGMENTS].reshape(-1, 5)
    for section in (Section.OWN_STARTS, Section.SLOTS, Section.TABLE_STARTS):
        parts[section] = parts[section].reshape(groups, -1)
    at = [header[group_word(group, GroupWord.TABLES)] for group in range(groups)]
    parts[Section.TABLES] = tuple(
        packed[at : at + s * width].reshape(s, width) for at, width in zip(at, widths, strict=True)
    )
    return StepBatch(*parts)
