"""engine/pipeline/pipeline_runner.py: in which order it launches, and how much of the time stages wait, by the clocks
of streams that compute one thing behind the other."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from engine.execution.gpu_memory import StepLimits
from engine.memory.streams import DeviceStream
from engine.pipeline import pipeline_runner
from engine.pipeline.pipeline_runner import FULL_ROWS, PARTS_MAX, ROWS_MIN, PipelineRunner, micro_batch_limits
from engine.pipeline.word_slots import WordSlots
from engine.protocol.types import SamplingParams
from engine.step.layout import Int32s, SequenceSlice, awaited_token, pack_step, unpack_step
from engine.step.order import StepOrder
from tests.support.small_models import BLOCK_TOKENS

CPU = torch.device("cpu")
GREEDY = SamplingParams()
HEAD_S = 0.2  # of a micro-batch; each stage takes 1 s for one, the first with its head
LIMITS = StepLimits.of(512, 4096, 4096, BLOCK_TOKENS)


class Stages:
    """What the first stage's runner, the memory and the followers are to rank 0, with a clock for each stage.

    now      in seconds, of the host.
    busy_s   for how long each stage has computed.
    ops      what was launched in the first stage: rows of its layers, or of a head.
    """

    def __init__(self, stages: int, mails: int = 64) -> None:
        self.now, self.busy_s, self.ops = 0.0, [0.0] * stages, list[str]()
        self._free_s = [0.0] * stages
        self._back_s: list[float] = []  # when the rows of each micro-batch are back
        self.landed_s = 0.0  # the end of the newest head
        graphs: Any = SimpleNamespace(captured_size=lambda rows: 0, capture_for=lambda rows: False, hot=False, sizes=())
        self.sampled, self.slots = 512, WordSlots(DeviceStream(CPU))
        self.bodies = self.ends = self.wide_bodies = graphs
        self.graphs, self.close = (graphs,) * 3, Mock()
        buffers = SimpleNamespace(
            embeddings_EH=torch.zeros(0, 8), masks_RW=torch.zeros(512, 4, dtype=torch.int32),
            words=torch.zeros(1 << 22, dtype=torch.int32), layout=None,
        )  # fmt: skip
        memory: Any = SimpleNamespace(
            pools=SimpleNamespace(pools=[SimpleNamespace(blocks=1 << 16)]), buffers=buffers, stream=DeviceStream(CPU),
            windows=None, sampled_rows=0, standby=False, awake=True, arrivals=list,
        )  # fmt: skip
        config: Any = SimpleNamespace(vocabulary=128, vectors=False, hidden=8)
        micro = micro_batch_limits(LIMITS, 4096, BLOCK_TOKENS, 1)
        own: Any = self
        self.announcer = Mock()
        self.runner = PipelineRunner(
            config, own, memory, (LIMITS, micro), 4096, stages, (mails, 1 << 20), self.announcer
        )

    def launch(self, order: StepOrder, words: torch.Tensor) -> None:
        self.ops.append(f"body {order.rows}")
        there_s = self._work(0, 1.0 - HEAD_S, self.now)
        for stage in range(1, len(self.busy_s)):
            there_s = self._work(stage, 1.0, there_s)
        if order.sampled_rows:
            self._back_s.append(there_s)

    def launch_head(self, order: StepOrder, *_: Any) -> None:
        self.ops.append(f"head {order.sampled_rows}")
        self.landed_s = self._work(0, HEAD_S, max(self.now, self._back_s.pop(0)))

    def _work(self, stage: int, seconds: float, since_s: float) -> float:
        self._free_s[stage] = max(since_s, self._free_s[stage]) + seconds
        self.busy_s[stage] += seconds
        return self._free_s[stage]


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SimpleNamespace(wide=False, words=np.zeros(0, np.int32))
    monkeypatch.setattr(pipeline_runner, "plan_attention", lambda *_: plan)


def decodes(rows: int, position: int, known: bool) -> Int32s:
    return pack_step(
        [SequenceSlice([5 if known else awaited_token(row)], position, [[row] * 3], GREEDY) for row in range(rows)],
        BLOCK_TOKENS,
    )


def idle_share(stages: int, rows: int, ahead: bool) -> float:
    """Which part of their time stages wait in steps of decodes, on average, each launched while the one before is in
    flight or once that has landed."""
    every = Stages(stages)
    runner, began_s = every.runner, 0.0
    inflight = runner.launch(decodes(rows, 0, known=True))
    for step in range(1, 40):
        if not ahead:
            runner.finish(inflight)
            every.now = every.landed_s
        if step == 4:  # the first steps fill the pipeline
            began_s, every.busy_s = max(every._free_s), [0.0] * stages
        before, inflight = inflight, runner.launch(decodes(rows, step, known=not ahead))
        if ahead:  # all heads of the step before are launched, and none of this one
            assert not before.left
            every.now = every.landed_s
    return 1 - sum(every.busy_s) / stages / (max(every._free_s) - began_s)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_compute_95_of_100_s_at_twice_as_many_micro_batches(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_runner, "FULL_ROWS", ROWS_MIN)
    rows = 2 * stages * ROWS_MIN
    assert idle_share(stages, rows, ahead=True) <= 0.05
    flushed = (stages - 1) / (2 * stages + stages - 1)  # where each step ends before the next one begins
    assert idle_share(stages, rows, ahead=False) == pytest.approx(flushed, abs=0.1)


def test_heads_come_as_late_as_may_be_and_layers_behind_them_one_by_one() -> None:
    every = Stages(2)
    first = every.runner.launch(decodes(2 * ROWS_MIN, 0, known=True))
    assert every.ops == ["body 16"] * 2
    second = every.runner.launch(decodes(2 * ROWS_MIN, 1, known=False))
    assert every.ops[2:] == ["head 16", "body 16"] * 2
    first.wait()
    assert len(every.ops) == 6
    second.wait()
    assert every.ops[6:] == ["head 16"] * 2
    assert [call.kwargs["more"] for call in every.announcer.launch.call_args_list] == [True, False] * 2


def test_a_token_that_another_micro_batch_samples_is_waited_for() -> None:
    """The first row of the next step names the last one of the step before."""
    every, rows = Stages(2), 2 * ROWS_MIN
    every.runner.launch(decodes(rows, 0, known=True))
    slices = [SequenceSlice([awaited_token(rows - 1 - row)], 1, [[row]], GREEDY) for row in range(rows)]
    every.runner.launch(pack_step(slices, BLOCK_TOKENS))
    assert every.ops[2:] == ["head 16", "head 16", "body 16", "body 16"]


def test_tokens_of_the_step_before_are_named_by_where_it_keeps_them() -> None:
    every = Stages(2)
    every.runner.launch(decodes(3, 0, known=True))
    for step, half in ((1, 0), (2, 1), (3, 0)):
        every.runner.launch(decodes(3, step, known=False))
        words = every.announcer.launch.call_args.args[1]
        named = [-1 - token for token in unpack_step(words).tokens_T.tolist()]
        assert named == [every.sampled * (1 + half) + row for row in range(3)]


def test_a_prompt_is_cut_so_that_stages_compute_at_once_and_into_no_larger_parts_than_there_is_room_for() -> None:
    every = Stages(2)
    for tokens, parts in ((8, 1), (40, 2), (600, 2), (1024, 4), (4096, 4)):
        every.ops.clear()
        table = list(range(-(-tokens // BLOCK_TOKENS)))
        every.runner.launch(pack_step([SequenceSlice([1] * tokens, 0, [table])], BLOCK_TOKENS)).wait()
        assert every.ops == [f"body {tokens // parts}"] * parts  # and no head: nothing is sampled
    assert micro_batch_limits(LIMITS, 4096, BLOCK_TOKENS, 1).rows == 4 * FULL_ROWS
    large = StepLimits.of(512, 64 * FULL_ROWS, 1 << 20, BLOCK_TOKENS)
    assert micro_batch_limits(large, 1 << 20, BLOCK_TOKENS, 1).rows == 64 * FULL_ROWS // PARTS_MAX


def test_no_more_rows_are_on_their_way_than_there_are_mails_for() -> None:
    every = Stages(2, mails=2)
    every.runner.launch(decodes(2 * ROWS_MIN, 0, known=True))
    every.runner.launch(decodes(2 * ROWS_MIN, 0, known=True))  # which names no token
    assert every.ops[2:] == ["head 16", "body 16", "head 16", "body 16"]


def test_a_step_without_its_masks_keeps_its_heads_and_not_the_layers_of_others() -> None:
    every = Stages(2)
    masked = [SequenceSlice([5], 0, [[row]], GREEDY, None, row == 0) for row in range(2 * ROWS_MIN)]
    step = every.runner.launch(pack_step(masked, BLOCK_TOKENS))
    every.runner.begin_all()
    assert every.ops == ["body 16"] * 2
    every.runner.sample(step, np.full((1, 4), -1, np.int32))
    assert every.ops == ["body 16"] * 2
    step.wait()
    assert every.ops[2:] == ["head 16"] * 2


def test_a_step_that_nobody_gave_masks_to_lands_all_the_same() -> None:
    every = Stages(2)
    step = every.runner.launch(pack_step([SequenceSlice([5], 0, [[0]], GREEDY, None, True)], BLOCK_TOKENS))
    step.wait()
    assert every.ops == ["body 1", "head 1"]
