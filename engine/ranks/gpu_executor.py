"""Steps of a model on several GPUs as rank 0 launches them: what the others are told of each, and what becomes of one
when a rank is lost. It knows neither how commands travel nor how a step is computed."""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np

from engine.execution.gpu_runner import GpuRunner
from engine.execution.gpu_sampler import StagedStep
from engine.pipeline.pipeline_runner import GpuPipelinedStep, PipelineRunner
from engine.ranks.command_ring import CommandKind
from engine.ranks.group import RankGroup, RankLost
from engine.ranks.leader import RankCommand, RankCommands
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, RunnerOutput
from engine.step.layout import Int32s
from engine.step.order import StepOrder

_ORDER: Final = struct.Struct("<7i")


class GpuAnnouncer:
    """A StepAnnouncer by commands. `launches` counts the steps that were announced."""

    def __init__(self, commands: RankCommands) -> None:
        self.launches = 0
        self._commands = commands

    def launch(self, order: StepOrder, words: Int32s, *, more: bool = False) -> None:
        self._commands.send(CommandKind.PART if more else CommandKind.LAUNCH, pack_order(order, words))
        self.launches += 1

    def head(self) -> None:
        self._commands.send(CommandKind.HEAD, b"")
        self.launches += 1

    def capture(self, graphs: int, size: int, capture: Callable[[], None], drop: Callable[[], None]) -> None:
        self._commands.attempt(
            RankCommand(CommandKind.CAPTURE, (graphs, size), capture),
            RankCommand(CommandKind.DROP, (graphs, size), drop),
        )

    def prepare(self) -> None:
        self._commands.say(CommandKind.PREPARE)


class RankedStep:
    """A step in flight on all ranks: what it gave counts for nothing where one was lost meanwhile."""

    def __init__(self, local: StagedStep | GpuPipelinedStep, group: RankGroup, finish: Callable[[], None]) -> None:
        """`finish` launches what is left of it."""
        self.local = local
        self._group = group
        self._finish = finish

    def wait(self) -> RunnerOutput:
        self._finish()
        output = self.local.wait()
        self._group.require()
        return output


class RankedGpuExecutor:
    """A DecoderExecutor of several GPUs."""

    def __init__(self, local: GpuRunner | PipelineRunner, announcer: GpuAnnouncer, group: RankGroup) -> None:
        self.limits = local.limits
        self.costs: CostModel | None = local.costs
        self.warm_up = local.warm_up
        self._local = local
        self._announcer = announcer
        self._group = group

    def launch(self, packed: Int32s) -> RankedStep:
        """As in StepExecutor. What is refused before it was announced changes nothing."""
        self._group.require()
        with self._launching():
            step = self._local.launch(packed)
        return RankedStep(step, self._group, partial(self._finish, step))

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        """As in MaskedSampler: rank 0 alone draws."""
        assert isinstance(step, RankedStep)
        if isinstance(self._local, GpuRunner):
            self._local.sample(step.local, masks_MW)
            return
        with self._launching():
            self._local.sample(step.local, masks_MW)

    def _finish(self, step: StagedStep | GpuPipelinedStep) -> None:
        if isinstance(self._local, PipelineRunner) and isinstance(step, GpuPipelinedStep) and step.left:
            self._group.require()
            with self._launching():
                self._local.finish(step)

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Within it rank 0 launches what it tells the others: what fails once they know of it is the end of all."""
        announced = self._announcer.launches
        try:
            with self._group.working():
                yield
        except RankLost:
            raise
        except Exception as error:
            if self._announcer.launches == announced:
                raise
            raise self._group.lose(f"rank 0 failed in a step: {error!r}"[:300]) from error


def pack_order(order: StepOrder, words: Int32s) -> bytes:
    return _ORDER.pack(*order) + words.tobytes()


def unpack_order(payload: bytes) -> tuple[StepOrder, Int32s]:
    rows, body_size, sampled_rows, head_size, wide, shared, whole = _ORDER.unpack_from(payload)
    order = StepOrder(rows, body_size, sampled_rows, head_size, bool(wide), bool(shared), bool(whole))
    return order, np.frombuffer(payload, np.int32, offset=_ORDER.size)
