"""engine/sequences/sequence.py: what a Submit becomes, and what is refused at the door."""

import math
from array import array
from dataclasses import replace

import msgspec
import pytest

from engine.protocol.frames import Submit
from engine.protocol.types import Grammar, GrammarKind, RejectReason, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.sequences.sequence import Sequence
from engine.sequences.validation import RequestValidator, SubmitRejected

TENANT = Scope(ScopeKind.TENANT, b"t" * 16, 3)
DOOR = RequestValidator(
    model_revision="r1",
    kv_layout="f32",
    block_tokens=4,
    max_total_tokens=20,
    vocabulary=100,
    stop_ids=frozenset({7}),
)


def packed(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def submit(**changes: object) -> Submit:
    plain = Submit(id=5, tokens=packed(1, 2, 3), scope=TENANT, sampling=SamplingParams(), max_tokens=4)
    return msgspec.structs.replace(plain, **changes)


def admitted(**changes: object) -> list[Sequence]:
    return DOOR.sequences(submit(**changes), owner=9, now_s=1.5)


def refusal(**changes: object) -> SubmitRejected:
    with pytest.raises(SubmitRejected) as raised:
        admitted(**changes)
    return raised.value


def test_submit_becomes_a_waiting_sequence_with_its_prompt() -> None:
    (sequence,) = admitted()
    assert (sequence.owner, sequence.id, sequence.tokens.tolist()) == (9, 5, [1, 2, 3])
    assert (sequence.prompt_tokens, sequence.pending, sequence.emitted) == (3, 3, 0)
    assert (sequence.block_count, sequence.lease, sequence.arrived_s) == (0, None, 1.5)


def test_choices_take_consecutive_ids_and_seeds_and_share_no_state() -> None:
    sequences = admitted(n=3, sampling=SamplingParams(seed=2**63 - 2, temperature=1.0, logit_bias={4: 1.0}))
    assert [sequence.id for sequence in sequences] == [5, 6, 7]
    assert [sequence.sampling.seed for sequence in sequences] == [2**63 - 2, 2**63 - 1, 0]
    assert all(sequence.sampling.logit_bias == {4: 1.0} for sequence in sequences)
    sequences[0].tokens.append(9)
    assert len(sequences[1].tokens) == 3


def test_stop_tokens_are_those_of_the_model_and_of_the_request() -> None:
    assert admitted(stop_ids=[8])[0].stop_ids == {7, 8}


def test_stop_tokens_beyond_the_vocabulary_bar_no_logit() -> None:
    (sequence,) = admitted(stop_ids=[99, 100, 1 << 31, -1], sampling=SamplingParams(min_tokens=2))
    assert sequence.sampling_behind(3).logit_bias == {7: -math.inf, 99: -math.inf}


def test_a_text_may_not_end_before_its_min_tokens() -> None:
    (sequence,) = admitted(stop_ids=[8], sampling=SamplingParams(min_tokens=2, logit_bias={4: 1.0, 7: 5.0}))
    barred = {4: 1.0, 7: -math.inf, 8: -math.inf}
    assert [sequence.sampling_behind(end).logit_bias for end in (3, 4)] == [barred] * 2
    assert sequence.sampling_behind(5) is sequence.sampling
    assert sequence.sampling.logit_bias == {4: 1.0, 7: 5.0}


def test_with_ignore_eos_no_token_ends_a_text() -> None:
    (sequence,) = admitted(stop_ids=[8], sampling=SamplingParams(ignore_eos=True, min_tokens=2))
    assert sequence.stop_ids == frozenset()
    assert sequence.sampling_behind(3).logit_bias == {}


def test_output_ends_at_max_tokens_or_at_the_end_of_the_context() -> None:
    assert admitted(max_tokens=4)[0].max_total_tokens == 7
    assert admitted(max_tokens=1000)[0].max_total_tokens == 20


def test_prompt_that_leaves_no_room_for_a_token_is_too_long() -> None:
    assert admitted(tokens=packed(*range(19)))[0].max_total_tokens == 20
    assert refusal(tokens=packed(*range(20))).reason == RejectReason.TOO_LONG


def test_namespace_tells_everything_apart_that_changes_the_kv() -> None:
    def namespace(door: RequestValidator = DOOR, **changes: object) -> object:
        return door.sequences(submit(**changes), 1, 0.0)[0].namespace

    different = [
        namespace(),
        namespace(scope=Scope(ScopeKind.TENANT, b"u" * 16, 3)),
        namespace(scope=Scope(ScopeKind.TENANT, b"t" * 16, 4)),
        namespace(scope=Scope(ScopeKind.USER, b"t" * 16, 3)),
        namespace(replace(DOOR, model_revision="r2")),
        namespace(replace(DOOR, kv_layout="bf16")),
        namespace(replace(DOOR, block_tokens=8)),
    ]
    assert len(set(different)) == len(different)
    assert namespace() == namespace(tokens=packed(9))


@pytest.mark.parametrize(
    "scope", [Scope(), Scope(ScopeKind.REQUEST, b"t" * 16), Scope(ScopeKind.TENANT, b""), Scope(ScopeKind.PUBLIC, b"")]
)
def test_request_scope_and_missing_scope_share_with_nobody(scope: Scope) -> None:
    assert admitted(scope=scope)[0].namespace is None


@pytest.mark.parametrize(
    ("scope", "account"),
    [
        (TENANT, TENANT.id),
        (Scope(ScopeKind.USER, b"u" * 16, account=b"t" * 16), b"t" * 16),
        (Scope(ScopeKind.REQUEST, account=b"t" * 16), b"t" * 16),
        (Scope(), b""),
    ],
)
def test_turns_are_taken_by_account_whatever_the_scope_shares(scope: Scope, account: bytes) -> None:
    assert admitted(scope=scope)[0].account == account


@pytest.mark.parametrize(
    "changes",
    [
        {"id": -1},
        {"id": 2**62},
        {"tokens": b""},
        {"tokens": b"abc"},
        {"tokens": packed(1, 100)},
        {"tokens": packed(2**32 - 1)},
        {"scope": Scope(ScopeKind.TENANT, b"short", 0)},
        {"scope": Scope(ScopeKind.TENANT, b"t" * 16, account=b"short")},
        {"terms": SchedulingTerms(floor_blocks=-1)},
        {"terms": SchedulingTerms(cap_blocks=-1)},
        {"terms": SchedulingTerms(keep_s=-1.0)},
        {"terms": SchedulingTerms(keep_s=float("nan"))},
        {"n": 0},
        {"n": 129},
        {"max_tokens": 0},
        {"stop_ids": [1] * 65},
        {"deadline_ms": -1},
        {"terms": SchedulingTerms(weight=0.0)},
        {"terms": SchedulingTerms(weight=-1.0)},
        {"terms": SchedulingTerms(weight=float("nan"))},
        {"terms": SchedulingTerms(weight=float("inf"))},
        {"terms": SchedulingTerms(sequences=0)},
        {"terms": SchedulingTerms(blocks=0)},
        {"sampling": SamplingParams(temperature=-0.1)},
        {"sampling": SamplingParams(temperature=float("nan"))},
        {"sampling": SamplingParams(temperature=float("inf"))},
        {"sampling": SamplingParams(top_k=-1)},
        {"sampling": SamplingParams(top_k=2**31)},
        {"sampling": SamplingParams(top_p=1.5)},
        {"sampling": SamplingParams(min_p=-0.5)},
        {"sampling": SamplingParams(repetition_penalty=0.0)},
        {"sampling": SamplingParams(frequency_penalty=float("nan"))},
        {"sampling": SamplingParams(presence_penalty=float("inf"))},
        {"sampling": SamplingParams(seed=-1)},
        {"sampling": SamplingParams(seed=2**63)},
        {"sampling": SamplingParams(logprobs=21)},
        {"sampling": SamplingParams(logprobs=-1)},
        {"sampling": SamplingParams(min_tokens=-1)},
        {"sampling": SamplingParams(min_tokens=1), "grammar": Grammar(GrammarKind.REGEX, "a")},
        {"sampling": SamplingParams(ignore_eos=True), "grammar": Grammar(GrammarKind.REGEX, "a")},
        {"sampling": SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))},
        {"sampling": SamplingParams(logit_bias={100: 1.0})},
        {"sampling": SamplingParams(logit_bias={-1: 1.0})},
        {"sampling": SamplingParams(logit_bias={1: float("nan")})},
    ],
)
def test_what_a_correct_gateway_does_not_send_is_invalid(changes: dict[str, object]) -> None:
    refused = refusal(**changes)
    assert refused.reason == RejectReason.INVALID
    assert refused.message


def test_no_submit_reaches_the_scope_of_what_is_published() -> None:
    published = DOOR.public_sequence(array("I", [1, 2, 3, 4])).namespace
    assert published is not None
    for kind in ScopeKind:
        for id in (b"", bytes(16)):
            assert admitted(scope=Scope(kind, id))[0].namespace != published


def test_growing_keeps_the_table_and_makes_room_for_more() -> None:
    (sequence,) = admitted()
    pages = [block + (number << 32) for number, block in enumerate(range(4, 30), 1)]
    sequence.append_pages(pages[:2])
    sequence.shared_blocks = 2
    for page in pages[2:]:
        sequence.append_pages([page])
    assert sequence.table[: sequence.block_count].tolist() == list(range(4, 30))
    assert sequence.held_pages() == pages
    assert sequence.private_pages() == pages[2:]
    sequence.rewind()
    assert (sequence.block_count, sequence.shared_blocks, sequence.private_pages()) == (0, 0, [])


@pytest.mark.parametrize(
    ("sampling", "looks_back"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=1.0, top_k=5), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
    ],
)
def test_only_penalties_look_at_the_tokens_so_far(sampling: SamplingParams, looks_back: bool) -> None:
    assert admitted(sampling=sampling)[0].penalized == looks_back
