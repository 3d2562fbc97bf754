"""Logits → tokens on a GPU: which of the sampling kernels a step needs, and the log probabilities that rows ask for.

Both end up in host memory, in the step that is in flight. The meaning is engine/step/sampling.py's. It knows no
sequences and no text.

R rows, V vocabulary, K alternatives, M masked rows, W words of a bit mask.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from engine.kernels.ranks.vocabulary import VocabularyRanks
from engine.kernels.ranks.windows import RankWindows
from engine.kernels.sampling.draw import add_biases, draw, forbid, penalise
from engine.kernels.sampling.filters import find_cutoffs
from engine.memory.streams import DeviceStream
from engine.protocol.types import LOGPROBS_MAX
from engine.step.executor import RunnerOutput
from engine.step.layout import Int32s, StepBatch
from engine.step.sampling import pooling_output


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """What some row of a step asks for beyond a temperature."""

    biases: bool = False
    penalties: bool = False
    masks: bool = False
    filters: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, batch: StepBatch) -> Self:
        rows = batch.sampling_R
        filtered_R = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
        return cls(
            biases=len(batch.bias_ids_B) > 0,
            penalties=len(batch.history_H) > 0,
            masks=batch.masked,
            filters=bool((filtered_R & (rows["temperature"] > 0)).any()),
            logprobs=bool((rows["logprobs"] >= 0).any()),
        )


TEMPERATURE_ONLY: Final = SamplingFeatures()
MASKS_ONLY: Final = SamplingFeatures(masks=True)


def vocabulary_ranks(windows: RankWindows | None, vocabulary: int) -> VocabularyRanks | None:
    """How ranks draw whose head is cut along the vocabulary; None where there is one."""
    return None if windows is None else VocabularyRanks(windows, vocabulary)


def sample_tokens(
    words: Tensor, logits_RV: Tensor, sampled_R: Tensor, masks_MW: Tensor, wants: SamplingFeatures
) -> None:
    """Chooses a token for each row. Until then `sampled_R` holds those of the step before, which histories may name.

    The logits stay as they are where log probabilities are read from them afterwards.
    """
    if wants.biases or wants.penalties or (wants.masks and wants.logprobs):
        logits_RV = logits_RV.to(torch.float32, copy=True)
    if wants.biases:
        add_biases(words, logits_RV)
    if wants.penalties:
        penalise(words, logits_RV, sampled_R)
    if wants.masks:
        forbid(words, logits_RV, masks_MW)
    draw(words, logits_RV, sampled_R, find_cutoffs(words, logits_RV) if wants.filters else None)


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of the raw logits: each row's token and its K most likely tokens.

    The tensors are on the device, or in the host memory that `copy_to` fills.
    """

    chosen_R: Tensor
    ids_RK: Tensor
    best_RK: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, tokens_R: Tensor) -> Self:
        """Costs a float32 copy of the logits."""
        logits_RV = logits_RV.float()
        log_total_R1 = logits_RV.logsumexp(-1, keepdim=True)
        best_RK, ids_RK = _top_logits(logits_RV, min(LOGPROBS_MAX, logits_RV.shape[1]))
        chosen_R1 = logits_RV.gather(1, tokens_R[:, None].long().clamp_min(0))
        return cls((chosen_R1 - log_total_R1)[:, 0], ids_RK, best_RK - log_total_R1)

    def copy_to(self, host: "LogprobTensors") -> None:
        """Queues the copy, into its first rows."""
        rows, count = self.ids_RK.shape
        host.chosen_R[:rows].copy_(self.chosen_R, non_blocking=True)
        host.ids_RK[:rows, :count].copy_(self.ids_RK, non_blocking=True)
        host.best_RK[:rows, :count].copy_(self.best_RK, non_blocking=True)

    def read(self, row: int, count: int) -> tuple[float, list[int], list[float]]:
        """Reads one row from host memory, as RunnerOutput has it. Among equally likely tokens the lower id is first."""
        ids_K, best_K = self.ids_RK[row].numpy(), self.best_RK[row].numpy()
        order = np.lexsort((ids_K, -best_K))[:count]
        return float(self.chosen_R[row]), ids_K[order].tolist(), best_K[order].tolist()


def _top_logits(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest logits and their ids; between ids that tie with the last one, where topk takes any, the lowest."""
    best_RK, ids_RK = logits_RV.topk(count, -1)
    vocabulary = logits_RV.shape[1]
    every_V = torch.arange(vocabulary, dtype=torch.int32, device=logits_RV.device)
    ties_RV = torch.where(logits_RV == best_RK[:, -1:], every_V, vocabulary)
    ties_RK = ties_RV.topk(count, -1, largest=False, sorted=True).values.long()
    above_RK = best_RK > best_RK[:, -1:]
    rank_RK = torch.arange(count, device=logits_RV.device) - above_RK.sum(-1, keepdim=True)
    return best_RK, torch.where(above_RK, ids_RK, ties_RK.gather(1, rank_RK.clamp_min(0)))


class MaskUpload:
    """Bit masks on their way to the device in a stream of their own, while layers are computed."""

    def __init__(self, stream: DeviceStream, masks_RW: Tensor) -> None:
        """`masks_RW` is where steps in `stream` read them."""
        self._stream, self._masks_RW = stream, masks_RW
        self._staged_RW = stream.staging(*masks_RW.shape, dtype=torch.int32)
        self._beside = DeviceStream(stream.device)
        self._uploaded = self._beside.mark()

    def upload(self, masks_MW: Int32s) -> None:
        """Queues masks before what the steps' stream gets from now on. Nothing reads those before any more."""
        count = len(masks_MW)
        assert masks_MW.shape[1] == self._masks_RW.shape[1], "masks of another vocabulary"
        self._staged_RW.numpy()[:count] = masks_MW
        with self._beside.entered():
            self._masks_RW[:count].copy_(self._staged_RW[:count], non_blocking=True)
            self._uploaded.set()
        self._stream.follow(self._uploaded)


class StagedStep:
    """An in-flight step on a GPU, with the host memory that it is uploaded from and its tokens are downloaded to.

    batch, logits_RV   the step and its rows' logits, while it lacks its masks; no logits where a graph computes them
                       when these are there, of masked_size rows.
    """

    def __init__(self, stream: DeviceStream, words: int, sequences: int, vector_width: int) -> None:
        """For steps of at most so many words and sequences; `vector_width` is 0 for a model that gives text."""
        self.words = stream.staging(words, dtype=torch.int32)
        self.tokens_R = stream.staging(sequences, dtype=torch.int32)
        self.reports = LogprobTensors(
            stream.staging(sequences, dtype=torch.float32),
            stream.staging(sequences, LOGPROBS_MAX, dtype=torch.int64),
            stream.staging(sequences, LOGPROBS_MAX, dtype=torch.float32),
        )
        self.vectors_RH = stream.staging(sequences, vector_width, dtype=torch.float32)
        self.mark = stream.mark()
        self.batch: StepBatch | None = None
        self.logits_RV: Tensor | None = None
        self.rows = self.masked_size = 0
        self.logprob_counts: dict[int, int] = {}
        self._tokens_R = self.tokens_R.numpy()

    def begin(self, batch: StepBatch) -> None:
        """Notes what is to be read of the step when it has landed."""
        self.batch = self.logits_RV = None
        self.rows, self.masked_size = len(batch.rows_R), 0
        counts = batch.sampling_R["logprobs"].tolist()
        self.logprob_counts = {row: count for row, count in enumerate(counts) if count >= 0}

    def wait(self) -> RunnerOutput:
        self.mark.wait()
        if self.vectors_RH.shape[1]:
            return pooling_output(self.vectors_RH[: self.rows].clone())
        logprobs = {row: self.reports.read(row, count) for row, count in self.logprob_counts.items()}
        return RunnerOutput(self._tokens_R[: self.rows].copy(), logprobs)
