"""Logits → tokens on a GPU: which of the sampling kernels a step needs, and the log probabilities that rows ask for.

The meaning is engine/step/sampling.py's. It knows no sequences and no text.

R rows, V vocabulary, K alternatives, M masked rows, W words of a bit mask.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from engine.kernels.sampling import add_biases, draw, forbid, penalise
from engine.kernels.sampling_filters import find_cutoffs
from engine.protocol.types import LOGPROBS_MAX
from engine.step.layout import StepBatch


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
