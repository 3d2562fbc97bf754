"""Steps of a model in stages as rank 0 runs them: cut into micro-batches, of which each stage computes another one.

Two steps are in flight: the micro-batches of a step follow those of the step before, each as soon as the tokens that it
names are sampled, so that no stage waits between steps. Rank 0 computes the first stage, and what comes behind the
last. It does not know how a stage computes, nor how tensors travel.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from engine.execution.cpu_runner import CpuStage
from engine.ranks.board import MAILS
from engine.ranks.command_ring import CommandKind
from engine.ranks.exchange import StageLink
from engine.ranks.leader import RankCommands
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, RunnerOutput
from engine.step.layout import Int32s, StepBatch, unpack_step
from engine.step.limits import ExecutorLimits, check_step
from engine.step.sampling import pooling_output, sample_batch
from engine.step.split import awaited_rows, split_step

ROWS_MIN: Final = 16  # of a micro-batch: with fewer, reading the weights once more costs more than a stage that waits
_STEPS_KEPT: Final = 4  # whose tokens later ones may name


class MicroBatch:
    """Some rows of a step, as a step of their own. `first_row` is the number of its first sampled row in the step; with
    the `last` one the step is computed."""

    def __init__(self, step: "PipelinedStep", packed: Int32s, first_row: int, *, last: bool) -> None:
        self.step, self.packed, self.batch, self.first_row = step, packed, unpack_step(packed), first_row
        self.last = last

    @property
    def masks_M(self) -> Int32s:
        """Which of the step's masks its rows have."""
        masks_R = self.batch.sampling_R["mask"]
        return np.asarray(masks_R[masks_R >= 0])

    @property
    def samplable(self) -> bool:
        """Whether nothing but its logits is missing to sample it."""
        return not self.batch.masked or self.step.masks_MW is not None


class PipelinedStep:
    """A step in flight.

    tokens_R  as far as `sampled` says that they are.
    left      how many micro-batches have not landed.
    """

    def __init__(self, number: int, batch: StepBatch, finish: Callable[["PipelinedStep"], None]) -> None:
        rows = len(batch.rows_R)
        self.number, self.left = number, 0
        self.tokens_R = np.zeros(rows, np.int32)
        self.sampled_R = np.zeros(rows, np.bool_)
        self.masks_MW: Int32s | None = None
        self._logprobs: dict[int, tuple[float, list[int], list[float]]] = {}
        self._vectors: list[np.ndarray] = []
        self._finish = finish

    def take(self, first_row: int, output: RunnerOutput) -> None:
        """Takes what was sampled of some rows. A row that is not finite ends its sequence: what computes with its token
        until then is of no use, and may be any."""
        rows = slice(first_row, first_row + len(output.tokens_R))
        self.tokens_R[rows], self.sampled_R[rows] = output.tokens_R, True
        self._logprobs |= {first_row + row: report for row, report in output.logprobs.items()}
        if output.vectors_RH is not None:
            self._vectors.append(output.vectors_RH)

    def wait(self) -> RunnerOutput:
        self._finish(self)
        vectors_RH = np.concatenate(self._vectors) if self._vectors else None
        return RunnerOutput(self.tokens_R, self._logprobs, vectors_RH)


class StagedExecutor:
    """A DecoderExecutor of several stages, as rank 0 of the first."""

    costs: CostModel | None = None

    def __init__(
        self, stage: CpuStage, link: StageLink, commands: RankCommands, limits: ExecutorLimits, gives_vectors: bool
    ) -> None:
        self.limits = limits
        self._stage, self._link, self._commands, self._gives_vectors = stage, link, commands, gives_vectors
        board = commands.group.board
        self._has_followers = board.ranks > board.stages  # in the first stage
        self._most = MAILS * board.stages
        self._steps: deque[PipelinedStep] = deque(maxlen=_STEPS_KEPT)
        self._launched = 0
        self._queued: deque[MicroBatch] = deque()
        self._running: deque[MicroBatch] = deque()

    def launch(self, packed: Int32s) -> PipelinedStep:
        """As in StepExecutor. Computes what can be without waiting for another stage."""
        batch = unpack_step(packed)
        check_step(batch, self.limits)
        step = PipelinedStep(self._launched, batch, self._finish)
        self._launched += 1
        self._steps.append(step)
        first_row = 0
        parts = split_step(packed, min(self._most, max(1, len(batch.tokens_T) // ROWS_MIN)))
        for part in parts:
            micro = MicroBatch(step, part, first_row, last=part is parts[-1])
            first_row += len(micro.batch.rows_R)
            step.left += 1
            self._queued.append(micro)
        while self._advance():
            pass
        return step

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        assert isinstance(step, PipelinedStep)
        assert masks_MW.shape[1] == -(-self.limits.vocabulary // 32), "masks of another vocabulary"
        step.masks_MW = masks_MW

    def warm_up(self) -> bool:
        """Returns False: there is nothing to prepare."""
        return False

    def begin_all(self) -> None:
        """Begins all that was launched: what the ranks are told next comes behind it."""
        while self._queued:
            self._advance_or_wait()

    def _finish(self, step: PipelinedStep) -> None:
        while step.left:
            self._advance_or_wait()

    def _advance_or_wait(self) -> None:
        if not self._advance():
            assert self._running, "micro-batches that wait for none"
            assert self._running[0].samplable, "masked rows without their masks"
            self._land()

    def _advance(self) -> bool:
        """Does what can be done at once: samples what came back, for others wait for its tokens, else begins a
        micro-batch. Returns whether there was something. Raises RankLost."""
        if self._running and self._running[0].samplable and self._link.has_mail:
            self._land()
            return True
        if self._queued and len(self._running) < self._most and self._resolve(self._queued[0], "tokens_T"):
            self._begin(self._queued.popleft())
            return True
        return False

    def _begin(self, micro: MicroBatch) -> None:
        kind = CommandKind.LAUNCH if micro.last else CommandKind.PART
        self._commands.send(kind, micro.packed.tobytes())
        with self._commands.computing():
            self._link.send(self._stage.compute(micro.batch, None))
        self._running.append(micro)

    def _land(self) -> None:
        """Samples the oldest of what is on its way, once it came back from the last stage."""
        micro = self._running.popleft()
        step, batch, rows = micro.step, micro.batch, len(micro.batch.rows_R)
        if self._has_followers:
            self._commands.send(CommandKind.HEAD, rows.to_bytes(8, "little"))
        sum_RH = self._link.receive(rows)
        if rows:
            with self._commands.computing():
                outputs_RV = self._stage.outputs(sum_RH)
            known = self._resolve(micro, "history_H")
            assert known, "a history that ends behind what is sampled"
            masks_MW = None if step.masks_MW is None else step.masks_MW[micro.masks_M]
            step.take(
                micro.first_row,
                pooling_output(outputs_RV) if self._gives_vectors else sample_batch(outputs_RV, batch, masks_MW),
            )
        step.left -= 1

    def _resolve(self, micro: MicroBatch, section: str) -> bool:
        """Puts in tokens that were not known as the step was launched. False where one is not sampled yet."""
        ids = getattr(micro.batch, section)
        number = micro.step.number - self._launched
        places = [(place, self._steps[number - back], row) for place, back, row in awaited_rows(ids)]
        if not all(step.sampled_R[row] for _, step, row in places):
            return False
        for place, step, row in places:
            ids[place] = max(0, step.tokens_R[row])
        return True
