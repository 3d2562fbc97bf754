from array import array

import pytest

from engine.protocol.frames import Submit
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from engine.scheduling.waiting import WaitingQueue
from engine.sequences.sequence import Sequence
from engine.sequences.validation import RequestValidator, SubmitRejected

DOOR = RequestValidator("r", "kv", 16, 100, 50, frozenset())


def test_a_deadline_is_not_that_of_the_next_request_with_its_id() -> None:
    clock = Clock()
    waiting = WaitingQueue(8, lambda sequence: 1.0, clock)
    first, second = asked(1, deadline_ms=1_000), asked(1, deadline_ms=5_000)
    waiting.add([first])
    waiting.remove(first)
    waiting.add([second])
    assert rejected(waiting, clock, at_s=2.0) == []
    assert rejected(waiting, clock, at_s=5.0) == [second]


def test_an_id_is_in_use_from_its_arrival_to_its_end() -> None:
    waiting = WaitingQueue(8, lambda sequence: 1.0, Clock())
    sequence = asked(1)
    waiting.refuse_known_id(sequence)
    waiting.add([sequence])
    waiting.start(sequence)
    with pytest.raises(SubmitRejected, match="id 1 is still in use"):
        waiting.refuse_known_id(asked(1))
    waiting.remove(sequence)
    waiting.refuse_known_id(asked(1))
    assert not waiting.sequences


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def asked(id: int, deadline_ms: int = 0) -> Sequence:
    scope = Scope(ScopeKind.TENANT, b"a" * 16)
    submit = Submit(id, array("I", [1, 2]).tobytes(), scope, SamplingParams(), max_tokens=4, deadline_ms=deadline_ms)
    (sequence,) = DOOR.sequences(submit, 1, 0.0)
    return sequence


def rejected(waiting: WaitingQueue, clock: Clock, at_s: float) -> list[Sequence]:
    clock.now_s = at_s
    waiting.expire()
    waiting.check()
    return [sequence for sequence, _ in waiting.take_rejects()]
