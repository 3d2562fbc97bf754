"""engine/scheduling/intake.py, as both schedulers have it: one contract for requests that come, leave and end."""

from array import array

import pytest

from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.kv_manager import KVManager
from engine.protocol.frames import Submit
from engine.protocol.types import FinishReason, Pooling, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.validation import RequestValidator, SubmitRejected
from prefixcache.tree import PrefixTree

CONFIG = SchedulerConfig(step_tokens=32, prompt_step_tokens=32, max_sequences=4, max_waiting=4)
SCOPE = Scope(ScopeKind.TENANT, b"a" * 16)


class Served:
    """A scheduler of either kind, with the requests that it takes."""

    def __init__(self, kind: str) -> None:
        self.pooling = Pooling.MEAN if kind == "encoder" else None
        poolings = frozenset({Pooling.MEAN} if self.pooling else ())
        self.validator = RequestValidator("r", "kv", 4, 64, 100, frozenset(), poolings=poolings)
        self.scheduler: Scheduler | EncoderScheduler
        if self.pooling is None:
            kv = KVManager(PrefixTree(16, 4, lambda: 0.0), BlockPool(16))
            self.scheduler = Scheduler(kv, CONFIG, lambda: 0.0)
        else:
            self.scheduler = EncoderScheduler(CONFIG, lambda: 0.0)
        self.intake = self.scheduler.intake

    def add(self, id: int, owner: int = 1, terms: SchedulingTerms | None = None) -> None:
        tokens = array("I", [owner, id, 1, 2, 3]).tobytes()
        submit = Submit(
            id, tokens, SCOPE, SamplingParams(), max_tokens=1, terms=terms or SchedulingTerms(), pooling=self.pooling
        )
        self.intake.add(self.validator.sequences(submit, owner, 0.0))

    def ends(self) -> dict[tuple[int, int], FinishReason]:
        self.scheduler.check()
        outputs = self.intake.take_outputs()
        return {(owner, end.id): end.reason for owner, output in outputs.items() for end in output.finished}


@pytest.fixture(params=["text", "encoder"])
def served(request: pytest.FixtureRequest) -> Served:
    return Served(request.param)


def test_an_id_in_use_is_refused_and_changes_nothing(served: Served) -> None:
    served.add(1)
    with pytest.raises(SubmitRejected, match="still in use"):
        served.add(1)
    served.add(1, owner=2)
    assert served.scheduler.load(draining=False).waiting == 2
    assert served.ends() == {}


def test_cancelled_sequences_end_once_whether_they_wait_or_run(served: Served) -> None:
    served.add(1)
    assert served.scheduler.next_batch() is not None
    served.add(2)
    served.intake.cancel(1, [1, 2, 3])
    served.intake.cancel(1, [1, 2])
    assert served.ends() == {(1, 1): FinishReason.CANCELLED, (1, 2): FinishReason.CANCELLED}
    assert served.intake.idle


def test_a_dropped_owner_is_sent_nothing_and_others_go_on(served: Served) -> None:
    for owner in (1, 2):
        served.add(7, owner)
    assert served.scheduler.next_batch() is not None
    served.intake.drop(1)
    assert served.intake.take_outputs().keys() == {2}
    assert [sequence.owner for sequence in served.intake.waiting.sequences.values()] == [2]


def test_end_all_ends_everything_with_its_message(served: Served) -> None:
    served.add(1)
    served.add(2)
    served.intake.end_all("over")
    outputs = served.intake.take_outputs()
    assert [(end.id, end.reason, end.message) for end in outputs[1].finished] == [
        (1, FinishReason.ERROR, "over"),
        (2, FinishReason.ERROR, "over"),
    ]
    assert served.scheduler.load(draining=False).counters["finished_error"] == 2
    assert served.intake.idle


def test_a_lost_step_ends_its_sequences_except_those_that_have_ended(served: Served) -> None:
    served.add(1)
    served.add(2)
    plan = served.scheduler.next_batch()
    assert plan is not None
    served.intake.cancel(1, [1])
    served.scheduler.fail(plan, "lost")
    assert served.ends() == {(1, 1): FinishReason.CANCELLED, (1, 2): FinishReason.ERROR}


def test_nothing_starts_while_nothing_is_admitted(served: Served) -> None:
    served.add(1)
    served.intake.admitting = False
    assert served.scheduler.next_batch() is None
    served.intake.admitting = True
    assert served.scheduler.next_batch() is not None


def test_the_end_of_a_secret_is_reported_once(served: Served) -> None:
    served.add(1, terms=SchedulingTerms(erase=True))
    assert not served.intake.waiting.take_secret_ended()
    served.intake.cancel(1, [1])
    assert served.intake.waiting.take_secret_ended()
    assert not served.intake.waiting.take_secret_ended()


def test_the_load_counts_live_and_background_apart(served: Served) -> None:
    served.add(1)
    served.add(2, terms=SchedulingTerms(background=True))
    assert served.scheduler.next_batch() is not None
    load = served.scheduler.load(draining=True)
    assert (load.running, load.waiting, load.background, load.draining) == (1, 0, 1, True)
