"""In-flight steps on a GPU: the host memory that a step is uploaded from and its tokens are downloaded to.

It knows no kernels.
"""

from dataclasses import dataclass
from typing import Final, Self

import torch

from engine.execution.gpu_sampler import LogprobTensors
from engine.memory.streams import DeviceStream
from engine.protocol.types import LOGPROBS_MAX
from engine.step.executor import RunnerOutput
from engine.step.layout import HEADER_WORDS, StepBatch
from engine.step.sampling import pooling_output

_STEP_TOKENS: Final = 2048
_PROMPT_STEP_TOKENS: Final = 8192
_SEQUENCES: Final = 512
_ROW_WORDS: Final = 48  # what a step has per row, tiles included
_MORE_WORDS: Final = 1 << 20  # histories, and tiles that are divided


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step; memory of fixed size is made for it."""

    rows: int
    sequences: int
    words: int
    step_tokens: int
    prompt_step_tokens: int

    @classmethod
    def of(cls, sequences: int | None, step_tokens: int | None, context_tokens: int, block_tokens: int) -> Self:
        """`sequences` and `step_tokens` as a spec asks for them, or None."""
        sequences = sequences or _SEQUENCES
        prompt_step_tokens = step_tokens or _PROMPT_STEP_TOKENS
        rows = min(max(prompt_step_tokens, sequences), sequences * context_tokens)
        tables = sequences * -(-context_tokens // block_tokens)
        words = HEADER_WORDS + rows * _ROW_WORDS + tables + _MORE_WORDS
        return cls(rows, sequences, words, step_tokens or _STEP_TOKENS, prompt_step_tokens)


class StagedStep:
    """An in-flight step on a GPU, with the host memory that it is uploaded from and its tokens are downloaded to.

    batch   the step, while it lacks its masks.
    """

    def __init__(self, stream: DeviceStream, step_limits: StepLimits, vector_width: int) -> None:
        """`vector_width` is 0 for a model that gives text."""
        self.words = stream.staging(step_limits.words, dtype=torch.int32)
        self.tokens_R = stream.staging(step_limits.sequences, dtype=torch.int32)
        self.reports = LogprobTensors(
            stream.staging(step_limits.sequences, dtype=torch.float32),
            stream.staging(step_limits.sequences, LOGPROBS_MAX, dtype=torch.int64),
            stream.staging(step_limits.sequences, LOGPROBS_MAX, dtype=torch.float32),
        )
        self.vectors_RH = stream.staging(step_limits.sequences, vector_width, dtype=torch.float32)
        self.mark = stream.mark()
        self.batch: StepBatch | None = None
        self.rows = 0
        self.logprob_counts: dict[int, int] = {}
        self._tokens_R = self.tokens_R.numpy()

    def begin(self, batch: StepBatch) -> None:
        """Notes what is to be read of the step when it has landed."""
        self.rows = len(batch.rows_R)
        counts = batch.sampling_R["logprobs"].tolist()
        self.logprob_counts = {row: count for row, count in enumerate(counts) if count >= 0}

    def wait(self) -> RunnerOutput:
        self.mark.wait()
        if self.vectors_RH.shape[1]:
            return pooling_output(self.vectors_RH[: self.rows].clone())
        logprobs = {row: self.reports.read(row, count) for row, count in self.logprob_counts.items()}
        return RunnerOutput(self._tokens_R[: self.rows].copy(), logprobs)
