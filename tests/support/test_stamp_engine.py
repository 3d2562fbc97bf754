"""tests/support/stamp_engine.py itself: each kind of illegal batch is caught, and a legal one reads what it should."""

from collections.abc import Sequence as Items
from contextlib import nullcontext

import numpy as np
import pytest
from msgspec.structs import replace

from engine.protocol.types import SamplingParams
from engine.step.executor import RunnerOutput
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import OFFSET_WORD, PrefixSegment, Section, SequenceSlice, pack_step
from tests.support.stamp_engine import Claim, IllegalRead, Stamps, logprobs_of, next_token, seen_by, solo

GREEDY = SamplingParams()
ONE, TWO = Claim(scope=1, sequence=1, shares=True), Claim(scope=1, sequence=2, shares=True)
FOREIGN = Claim(scope=2, sequence=3, shares=True)


@pytest.fixture
def stamps() -> Stamps:
    """Block 3, then 1, hold the first five tokens of sequence one."""
    stamps = Stamps(blocks=8, block_tokens=4, vocabulary=100)
    fly(stamps, [SequenceSlice([10, 11, 12, 13, 14], 0, [[3, 1]])], [ONE])
    return stamps


def fly(
    stamps: Stamps, slices: list[SequenceSlice], claims: list[Claim], segments: Items[PrefixSegment] = ()
) -> RunnerOutput:
    stamps.claims = claims
    return stamps.launch(pack_step(slices, stamps.block_tokens, segments)).wait()


def test_text_of_a_legal_run_is_that_of_the_tokens_alone(stamps: Stamps) -> None:
    tokens, output = [10, 11, 12, 13, 14], []
    table = [3, 1, 0]
    for position in range(5, 12):
        fed = [tokens[-1]] if position > 5 else []
        step = fly(stamps, [SequenceSlice(fed or [14], position - 1, [table], GREEDY)], [ONE])
        tokens.append(int(step.tokens_R[0]))
        output.append(tokens[-1])
    assert output == solo([10, 11, 12, 13, 14], GREEDY, 12, [], 100)[0]


def test_prefix_of_the_same_scope_may_be_read(stamps: Stamps) -> None:
    step = fly(stamps, [SequenceSlice([20], 4, [[3, 2]], GREEDY)], [TWO])
    assert step.tokens_R.tolist() == [next_token(np.array([10, 11, 12, 13, 20]), None, 100, {})]


@pytest.mark.parametrize(
    ("item", "claim"),
    [
        (SequenceSlice([20], 4, [[3, 2]], GREEDY), FOREIGN),  # a prefix of another scope
        (SequenceSlice([20], 4, [[3, 2]], GREEDY), Claim(1, 2, shares=False)),  # of another sequence, without sharing
        (SequenceSlice([20], 4, [[5, 2]], GREEDY), ONE),  # never written
        (SequenceSlice([20], 4, [[1, 2]], GREEDY), ONE),  # written for other positions
        (SequenceSlice([20], 8, [[3, 1, 2]], GREEDY), ONE),  # half of it never written
    ],
    ids=["scope", "sequence", "empty", "position", "partial"],
)
def test_illegal_read_is_caught(stamps: Stamps, item: SequenceSlice, claim: Claim) -> None:
    with pytest.raises(IllegalRead):
        fly(stamps, [item], [claim])


def test_overwritten_block_is_caught_by_its_reader(stamps: Stamps) -> None:
    fly(stamps, [SequenceSlice([30, 31], 0, [[3]])], [FOREIGN])
    with pytest.raises(IllegalRead):
        fly(stamps, [SequenceSlice([15], 5, [[3, 1]], GREEDY)], [ONE])


def test_other_tokens_in_the_cache_give_another_text(stamps: Stamps) -> None:
    honest = fly(stamps, [SequenceSlice([15], 5, [[3, 1]], GREEDY)], [ONE]).tokens_R.tolist()
    stamps.token_GK[0, 3 * 4 + 2] = 99
    assert fly(stamps, [SequenceSlice([15], 5, [[3, 1]], GREEDY)], [ONE]).tokens_R.tolist() != honest


def test_two_writers_of_a_block_and_a_reader_of_a_written_one_are_caught(stamps: Stamps) -> None:
    with pytest.raises(IllegalRead):
        fly(stamps, [SequenceSlice([1], 0, [[5]]), SequenceSlice([2], 0, [[5]])], [ONE, TWO])
    with pytest.raises(IllegalRead):
        fly(stamps, [SequenceSlice([15], 5, [[3, 1]]), SequenceSlice([16], 6, [[3, 1]])], [ONE, TWO])


def test_history_must_be_what_the_cache_holds(stamps: Stamps) -> None:
    penalized = SamplingParams(presence_penalty=1.0)
    tokens = [10, 11, 12, 13, 14, 15]
    fly(stamps, [SequenceSlice([15], 5, [[3, 1]], penalized, (tokens, 5))], [ONE])
    with pytest.raises(IllegalRead):
        fly(stamps, [SequenceSlice([15], 5, [[3, 1]], penalized, (tokens[:-1], 5))], [ONE])


def test_a_token_that_is_not_known_yet_is_the_one_that_its_row_sampled(stamps: Stamps) -> None:
    penalized = SamplingParams(presence_penalty=1.0)
    first = fly(stamps, [SequenceSlice([1], 0, [[5]], GREEDY), SequenceSlice([15], 5, [[3, 1]], GREEDY)], [TWO, ONE])
    coming = SequenceSlice([-2], 6, [[3, 1]], penalized, ([10, 11, 12, 13, 14, 15], 5))
    token = int(first.tokens_R[1])
    second = fly(stamps, [coming], [ONE])
    assert second.tokens_R.tolist() == [next_token(np.array([10, 11, 12, 13, 14, 15, token]), None, 100, {})]


def test_who_reads_what_is_not_finite_samples_none_until_it_is_written_again(stamps: Stamps) -> None:
    stamps.glitch = 0
    slices = [SequenceSlice([15], 5, [[3, 1]], GREEDY), SequenceSlice([1], 0, [[5]], GREEDY)]
    assert [token < 0 for token in fly(stamps, slices, [ONE, TWO]).tokens_R.tolist()] == [True, False]
    assert fly(stamps, [SequenceSlice([16], 6, [[3, 1]], GREEDY)], [ONE]).tokens_R.tolist() == [-1]
    assert fly(stamps, slices, [ONE, TWO]).tokens_R.min() >= 0


def test_a_lost_slice_leaves_rubbish_that_nobody_may_read(stamps: Stamps) -> None:
    fly(stamps, [SequenceSlice([15], 5, [[3, 1]], GREEDY)], [Claim(1, 1, shares=True, lost=True)])
    with pytest.raises(IllegalRead):
        fly(stamps, [SequenceSlice([16], 6, [[3, 1]], GREEDY)], [ONE])


def test_members_read_a_segment_where_the_first_of_them_has_it(stamps: Stamps) -> None:
    fly(stamps, [SequenceSlice([20], 4, [[3, 2]])], [TWO])
    slices = [SequenceSlice([15], 5, [[3, 1]], GREEDY), SequenceSlice([21], 5, [[3, 2]], GREEDY)]
    alone = fly(stamps, slices, [ONE, TWO]).tokens_R.tolist()
    assert fly(stamps, slices, [ONE, TWO], [PrefixSegment([0, 1], 0, 4)]).tokens_R.tolist() == alone


def test_a_group_of_different_blocks_is_caught(stamps: Stamps) -> None:
    fly(stamps, [SequenceSlice([10, 11, 12, 13, 14], 0, [[5, 2]])], [TWO])
    with pytest.raises(IllegalRead, match="have different blocks"):
        fly(
            stamps,
            [SequenceSlice([15], 5, [[3, 1]]), SequenceSlice([15], 5, [[5, 2]])],
            [ONE, TWO],
            [PrefixSegment([0, 1], 0, 4)],
        )


def test_a_group_of_prompts_is_caught(stamps: Stamps) -> None:
    with pytest.raises(IllegalRead, match="several rows"):
        fly(
            stamps,
            [SequenceSlice([15], 5, [[3, 1]]), SequenceSlice([20, 21], 4, [[3, 2]])],
            [ONE, TWO],
            [PrefixSegment([0, 1], 0, 4)],
        )


def test_keys_that_lie_in_no_segment_and_are_not_read_as_own_are_caught(stamps: Stamps) -> None:
    packed = pack_step([SequenceSlice([15], 5, [[3, 1]])], stamps.block_tokens)
    packed[packed[OFFSET_WORD + Section.OWN_STARTS]] = 4
    with pytest.raises(IllegalRead, match="own keys from 4, segments to 0"):
        stamps.launch(packed)


def test_seed_matters_only_above_temperature_zero(stamps: Stamps) -> None:
    def text(temperature: float, seed: int) -> list[int]:
        return solo([1, 2], SamplingParams(temperature=temperature, seed=seed), 12, [], 1000)[0]

    assert text(0.0, 1) == text(0.0, 2)
    assert text(1.0, 1) != text(1.0, 2)


def test_logprobs_are_reported_for_the_rows_that_ask(stamps: Stamps) -> None:
    slices = [SequenceSlice([15], 5, [[3, 1]], GREEDY), SequenceSlice([1], 0, [[5]], SamplingParams(logprobs=2))]
    step = fly(stamps, slices, [ONE, TWO])
    assert step.logprobs == {1: logprobs_of(int(step.tokens_R[1]), 2)}


TEXT = list(range(10, 21))
SPANS = (FULL, KeySpan(window=4), KeySpan(chunk=8))


def test_each_group_is_read_as_its_span_shows_it_and_for_each_row_as_that_sees_it() -> None:
    stamps = Stamps(blocks=16, block_tokens=4, vocabulary=100, spans=SPANS)
    fly(stamps, [SequenceSlice(TEXT, 0, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])], [ONE])
    penalized, ids = SamplingParams(presence_penalty=1.0), [*TEXT, 21, 22]
    tables, firsts = [[0, 1, 2, 9], [5, 10], [8, 11]], [0, 2, 2]
    item = SequenceSlice([21, 22], 11, tables, penalized, (ids, 5), wanted=2, table_starts=firsts)
    found = fly(stamps, [item], [ONE]).tokens_R.tolist()
    assert found == [next_token(seen_by(SPANS, np.array(ids[:end])), None, 100, {}) for end in (12, 13)]
    assert found[0] != next_token(seen_by(SPANS[:2], np.array(ids[:12])), None, 100, {})


def test_a_table_that_begins_behind_what_its_span_shows_is_caught() -> None:
    stamps = Stamps(blocks=8, block_tokens=4, vocabulary=100, spans=(KeySpan(window=4),))
    fly(stamps, [SequenceSlice([*TEXT, 21], 0, [[0, 1, 2]])], [ONE])
    with pytest.raises(IllegalRead, match="sees key 9, and its table begins with key 12"):
        fly(stamps, [SequenceSlice([22], 12, [[3]], table_starts=[3])], [ONE])


@pytest.mark.parametrize(("slot", "caught"), [(7, False), (8, True), (10, True)])
def test_what_is_behind_a_window_may_be_anybodys_and_what_is_in_it_may_not(slot: int, caught: bool) -> None:
    stamps = Stamps(blocks=8, block_tokens=4, vocabulary=100, spans=(KeySpan(window=4),))
    fly(stamps, [SequenceSlice(TEXT, 0, [[0, 1, 2]])], [ONE])
    stamps.scope_GK[0, slot] = FOREIGN.scope
    with pytest.raises(IllegalRead, match="scope") if caught else nullcontext():
        fly(stamps, [SequenceSlice([21], 11, [[0, 1, 2]], GREEDY)], [ONE])


def test_a_segment_is_read_where_its_owner_has_it_still_and_must_be_the_same_blocks() -> None:
    stamps = Stamps(blocks=8, block_tokens=4, vocabulary=100, spans=(KeySpan(window=6),))
    fly(stamps, [SequenceSlice(TEXT[:8], 0, [[0, 1]])], [ONE])
    one, two = SequenceSlice([1, 2], 8, [[0, 1, 2]]), SequenceSlice([3], 8, [[0, 1, 3]])
    fly(stamps, [one, two], [ONE, TWO])
    one, two = (replace(item, tokens=[4], start=10, sampling=GREEDY) for item in (one, two))
    two = replace(two, start=9)
    alone = fly(stamps, [one, two], [ONE, TWO]).tokens_R.tolist()
    late = replace(one, tables=[[1, 2]], table_starts=[1])
    for owner in (one, late):
        segment = PrefixSegment([0, 1], 0, 8)
        assert fly(stamps, [owner, two], [ONE, TWO], [segment]).tokens_R.tolist() == alone
        with pytest.raises(IllegalRead, match="have different blocks"):
            fly(stamps, [owner, replace(two, tables=[[0, 4, 3]])], [ONE, TWO], [segment])
