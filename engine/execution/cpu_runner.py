"""Runs steps on a CPU, where launching computes. It does not know where the memory comes from."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.execution.cpu_memory import CpuMemory
from engine.models.config import ModelConfig
from engine.models.cpu_step import CpuStep
from engine.models.decoder_layer import rope_tables
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, RunnerOutput
from engine.step.layout import ExecutorLimits, Int32s, StepBatch, check_step, unpack_step
from engine.step.sampling import pooling_output, sample_batch


@dataclass(slots=True)
class CompletedStep:
    """A step that is already done, since launching computes; or all but its sampling, until there are masks."""

    outcome: RunnerOutput | tuple[Tensor, StepBatch]

    def wait(self) -> RunnerOutput:
        assert isinstance(self.outcome, RunnerOutput), "masked rows without their masks"
        return self.outcome


class CpuRunner:
    """A decoder's StepExecutor and MaskedSampler on a CPU."""

    costs: CostModel | None = None

    def __init__(
        self, config: ModelConfig, memory: CpuMemory, limits: ExecutorLimits, beat: Callable[[], None]
    ) -> None:
        self.limits = limits
        self._config = config
        self._memory = memory
        self._rotary = rope_tables(config.rope, config.head_dim, limits.context_tokens)
        self._beat = beat

    def launch(self, packed: Int32s) -> InflightStep:
        batch = unpack_step(packed)
        check_step(batch, self.limits)
        assert batch.tokens_T.min() >= 0, "a token that is not known yet, though every step has landed"
        logits_RV = self.logits(batch)
        if logits_RV is None:
            return CompletedStep(RunnerOutput(np.empty(0, np.int32), {}))
        if batch.masked:
            return CompletedStep((logits_RV, batch))
        return CompletedStep(pooling_output(logits_RV) if self._config.vectors else sample_batch(logits_RV, batch))

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        assert isinstance(step, CompletedStep)
        assert isinstance(step.outcome, tuple), "a step without masked rows, or with its masks already"
        assert masks_MW.shape[1] == -(-self.limits.vocabulary // 32), "masks of another vocabulary"
        step.outcome = sample_batch(*step.outcome, masks_MW)

    def warm_up(self) -> bool:
        """Returns False: there is nothing to prepare."""
        return False

    def logits(self, batch: StepBatch) -> Tensor | None:
        """Runs a step. Returns float32 [R, V], or [R, H] where the model gives vectors; None without sampled rows."""
        decoder = self._memory.decoder
        assert decoder is not None, "asleep"
        step = CpuStep(batch, self._config, self._rotary, self._memory.pool)
        decoder.body(step, self._beat)
        return decoder.head(step) if len(batch.rows_R) else None
