"""What a rank has of stages beside its share of the model: which of them is its own, the windows that all ranks share,
and what launches its part of steps there. It knows no commands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engine.execution.gpu_memory import SEQUENCES, StepLimits
from engine.execution.gpu_model import GpuModel
from engine.execution.memory_plan import DoesNotFit
from engine.kernels.ranks.handover import MAIL_BYTES, StageWindows, mails_bytes
from engine.pipeline.pipeline_runner import KEPT_STEPS, PARTS_MAX, PipelineRunner, micro_batch_limits
from engine.pipeline.stage_runner import StageRunner
from engine.pipeline.word_slots import SLOTS_MAX
from engine.protocol.specs import ModelSpec
from engine.step.order import StepAnnouncer

__all__ = ["KEPT_STEPS", "Lead", "StagePart", "bytes_of_mails", "mails_of"]

Lead = Callable[[PipelineRunner], None]
"""Is told of what runs steps on rank 0."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """Which of so many stages a rank is of, and the windows of all ranks as it sees them."""

    number: int
    count: int
    windows: StageWindows

    @classmethod
    def of(cls, model: ModelSpec, memory_WB: Tensor, rank: int, first: int, mails: int) -> Self:
        """The part of a rank of the model, whose windows have so many mails from byte `first` on."""
        ranks = model.gpus * model.stages
        following, previous = ((rank + step) % ranks for step in (model.gpus, -model.gpus))
        windows = StageWindows(memory_WB, rank, following, previous, first, mails)
        return cls(rank // model.gpus, model.stages, windows)

    def launch_limits(self, model: ModelSpec, limits: StepLimits, context_tokens: int, groups: int) -> StepLimits:
        """The largest micro-batch of steps of these limits."""
        return micro_batch_limits(limits, context_tokens, model.block_tokens, groups)

    def runner(self, opened: GpuModel, graph_rows: int, announcer: StepAnnouncer | None = None) -> StageRunner:
        """What launches this rank's part of micro-batches."""
        return StageRunner(
            opened.config, opened.parameters, opened.memory, opened.launch_limits, graph_rows, self.windows,
            (self.number == 0, self.number == self.count - 1), announcer,
        )  # fmt: skip

    def pipeline(self, opened: GpuModel, graph_rows: int, announcer: StepAnnouncer, lead: "Lead") -> PipelineRunner:
        """What runs steps on rank 0, of which `lead` is told."""
        runner = PipelineRunner(
            opened.config, self.runner(opened, graph_rows, announcer), opened.memory,
            (opened.step_limits, opened.launch_limits), opened.context_tokens, self.count,
            (self.windows.mails, self.windows.rows_of(opened.config.hidden)), announcer,
            whole=graph_rows == 0 and opened.memory.stream.queues,
        )  # fmt: skip
        lead(runner)
        return runner


def mails_of(model: ModelSpec, hidden: int) -> int:
    """How many mails each rank's window has, none without stages: all rows that a step may sample are on their way back
    at once, and some of each of its micro-batches. Raises DoesNotFit."""
    if model.stages == 1:
        return 0
    sequences, rows = model.sequences or SEQUENCES, MAIL_BYTES // (4 * hidden)
    mails = 2 * PARTS_MAX + -(-sequences // max(1, rows))  # a graph may have more rows than are wanted
    if not rows or mails + 2 * PARTS_MAX >= SLOTS_MAX:
        raise DoesNotFit(
            f"{model.name}: stages = {model.stages} and {sequences} sequences of {hidden} numbers each take too many "
            "mails between stages: set sequences to less"
        )
    return mails


def bytes_of_mails(mails: int) -> int:
    """What so many take of a window."""
    return mails_bytes(mails) if mails else 0
