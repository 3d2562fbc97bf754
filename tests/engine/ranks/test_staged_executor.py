"""engine/ranks/staged_executor.py: how much of the time stages wait, by a clock that the stages themselves move."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.protocol.types import SamplingParams
from engine.ranks.command_ring import CommandKind
from engine.ranks.staged_executor import ROWS_MIN, StagedExecutor
from engine.step.layout import SequenceSlice, StepBatch, awaited_token, pack_step
from engine.step.limits import ExecutorLimits

VOCABULARY = 8
HEAD_S = 0.2  # of a micro-batch; each stage takes 1 s for one, the first with its head
GREEDY = SamplingParams()


class Pipeline:
    """Stages that compute one micro-batch after the other, as CpuStage, StageLink and RankCommands of rank 0 show it.

    now     in seconds, on rank 0.
    busy_s  for how long each stage has computed.
    """

    def __init__(self, stages: int) -> None:
        self.now, self.busy_s = 0.0, [0.0] * stages
        self.group = SimpleNamespace(board=SimpleNamespace(ranks=stages, stages=stages))
        self.computing = nullcontext
        self._free_s = [0.0] * stages  # when each has done all that it got
        self._arrivals: list[float] = []
        self._rows: list[int] = []
        self._received = 0
        self.commands: list[CommandKind] = []

    def send_command(self, kind: CommandKind, payload: bytes) -> None:
        self.commands.append(kind)

    def compute(self, batch: StepBatch, sum_TH: Tensor | None) -> Tensor:
        self._work(1.0 - HEAD_S)
        self._rows.append(len(batch.rows_R))
        return torch.empty(len(batch.tokens_T), 1)

    def outputs(self, sum_RH: Tensor) -> Tensor:
        self._work(HEAD_S)
        return torch.nn.functional.one_hot(torch.arange(len(sum_RH)) % VOCABULARY, VOCABULARY).float()

    def send(self, sum_TH: Tensor) -> None:
        there_s = self.now
        for stage in range(1, len(self.busy_s)):
            there_s = self._free_s[stage] = max(there_s, self._free_s[stage]) + 1.0
            self.busy_s[stage] += 1.0
        self._arrivals.append(there_s)

    @property
    def has_mail(self) -> bool:
        return self._received < len(self._arrivals) and self._arrivals[self._received] <= self.now

    def receive(self, rows: int) -> Tensor:
        assert rows == self._rows[self._received]
        self.now = max(self.now, self._arrivals[self._received])
        self._received += 1
        return torch.empty(rows, 1)

    def _work(self, seconds: float) -> None:
        self.now += seconds
        self.busy_s[0] += seconds


def executor_of(pipeline: Pipeline) -> StagedExecutor:
    limits = ExecutorLimits(64, VOCABULARY, (1024,), 512, 512, 512, depth=2)
    commands: Any = SimpleNamespace(group=pipeline.group, computing=pipeline.computing, send=pipeline.send_command)
    stage: Any = pipeline
    link: Any = pipeline
    return StagedExecutor(stage, link, commands, limits, gives_vectors=False)


def idle_share(stages: int, steps_in_flight: int, micro_batches: int) -> float:
    """Which part of their time stages wait in 12 steps of decodes, on average."""
    pipeline = Pipeline(stages)
    executor, rows, inflight = executor_of(pipeline), micro_batches * ROWS_MIN, []
    began_s = 0.0
    for step in range(14):
        tokens = [awaited_token(row) if inflight else row % VOCABULARY for row in range(rows)]
        slices = [SequenceSlice([token], step, [[row]], GREEDY) for row, token in enumerate(tokens)]
        inflight.append(executor.launch(pack_step(slices, 16)))
        if step == 2:  # the first steps fill the pipeline
            began_s, pipeline.busy_s = pipeline.now, [0.0] * stages
        while len(inflight) >= steps_in_flight:
            output = inflight.pop(0).wait()
            assert output.tokens_R.tolist() == [row % ROWS_MIN % VOCABULARY for row in range(rows)]
    return 1 - sum(pipeline.busy_s) / stages / (pipeline.now - began_s)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_compute_95_of_100_s_at_twice_as_many_micro_batches(stages: int) -> None:
    assert idle_share(stages, 2, 2 * stages) <= 0.05
    flushed = (stages - 1) / (2 * stages + stages - 1)  # where each step ends before the next one begins
    assert idle_share(stages, 1, 2 * stages) == pytest.approx(flushed, abs=0.1)
    assert idle_share(stages, 1, 2 * stages) > 0.1


def test_few_rows_are_not_cut_smaller_than_is_worth_it() -> None:
    pipeline = Pipeline(2)
    executor = executor_of(pipeline)
    slices = [SequenceSlice([1], 0, [[row]], GREEDY) for row in range(ROWS_MIN + 3)]
    executor.launch(pack_step(slices, 16)).wait()
    assert pipeline.busy_s == [1.0, 1.0]
    assert pipeline.commands == [CommandKind.LAUNCH]


def test_the_last_micro_batch_of_a_step_alone_counts_as_a_step() -> None:
    pipeline = Pipeline(2)
    slices = [SequenceSlice([1], 0, [[row]], GREEDY) for row in range(4 * ROWS_MIN)]
    executor_of(pipeline).launch(pack_step(slices, 16)).wait()
    assert pipeline.commands == [*[CommandKind.PART] * 3, CommandKind.LAUNCH]
