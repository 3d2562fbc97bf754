"""A decoder's steps on a CPU, where launching computes; and a stage's part of such steps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.execution.cpu_memory import CpuMemory
from engine.kernels.reference import cap_
from engine.layers.row_ops import add_norm
from engine.models.config import ModelConfig
from engine.models.cpu_step import CpuLayers, CpuStep
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, RunnerOutput
from engine.step.layout import Int32s, StepBatch, unpack_step
from engine.step.limits import ExecutorLimits, check_step
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
        self._embeddings_EH = torch.zeros(limits.embedding_rows, config.hidden)
        if memory.images is not None:
            self._embeddings_EH = memory.images.rows_EH
        self._layers = CpuLayers(config, limits.context_tokens)
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
        step = CpuStep(batch, self._config, self._layers, self._memory.pools, self._embeddings_EH)
        if (
            len(batch.tokens_T) == len(batch.rows_R) == 1
            and (row := self._memory.row_decoder(self._layers)) is not None
        ):
            return row.logits(step, self._beat)
        decoder.body(step, self._beat)
        if self._memory.images is not None:
            self._memory.images.clear()
        return decoder.head(step) if len(batch.rows_R) else None


class CpuStage:
    """What one stage computes of a model whose other layers are elsewhere.

    T rows, R wanted rows, H hidden size, V vocabulary.
    """

    def __init__(
        self, config: ModelConfig, memory: CpuMemory, context_tokens: int, is_last: bool, beat: Callable[[], None]
    ) -> None:
        self._config, self._memory, self._is_last, self._beat = config, memory, is_last, beat
        self._layers = CpuLayers(config, context_tokens)
        self._no_rows_EH = torch.zeros(0, config.hidden)

    def compute(self, batch: StepBatch, sum_TH: Tensor | None) -> Tensor:
        """The sum behind the stage's layers, float32 [T, H], or [R, H] behind the last ones; from the sum before them,
        whose memory it may take, or from the tokens."""
        decoder = self._memory.decoder
        assert decoder is not None, "asleep"
        step = CpuStep(batch, self._config, self._layers, self._memory.pools, self._no_rows_EH)
        if sum_TH is None:
            step.embed(decoder.parameters.embedding)
        else:
            step.resume(sum_TH, self._memory.pools.shape.dtype)
        if self._is_last and not len(batch.rows_R):
            decoder.through(step, self._beat)
            return step.sum_TH[:0]
        decoder.stage(step, self._beat, narrow=self._is_last)
        return step.sum_TH

    def outputs(self, sum_RH: Tensor) -> Tensor:
        """What a model gives for rows behind all layers, float32 [R, V], or [R, H] where it gives vectors."""
        decoder, config = self._memory.decoder, self._config
        assert decoder is not None, "asleep"
        dtype = self._memory.pools.shape.dtype
        normed_RH = add_norm(sum_RH, None, decoder.parameters.norm, config.norm_epsilon, dtype)
        logits_RV = decoder.parameters.head.logits(normed_RH)
        return cap_(logits_RV.contiguous(), config.logits_cap) if config.logits_cap else logits_RV
