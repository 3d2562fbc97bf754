"""Tokens from logits that several ranks have, each those of its part of the vocabulary: each draws from its own, and
rank 0 chooses between the best. So no logits cross from GPU to GPU where rows have a temperature and nothing else.

R sampled rows, V vocabulary of all ranks, C chunks of it, W ranks.
"""

from itertools import accumulate, pairwise

import torch
import triton
from torch import Tensor

from engine.kernels.ranks.gather import gather_columns
from engine.kernels.ranks.windows import RankWindows
from engine.kernels.sampling.draw import CHUNK, choose, draw_chunks
from engine.layers.rank_shard import RankShard


class VocabularyRanks:
    """How the ranks of these windows share a vocabulary."""

    def __init__(self, windows: RankWindows, vocabulary: int) -> None:
        self._windows = windows
        shards = [RankShard(rank, windows.ranks).of(vocabulary) for rank in range(windows.ranks)]
        firsts = [*(shard.start for shard in shards), vocabulary]
        self._first = firsts[windows.rank]
        chunks = [triton.cdiv(last - first, CHUNK) for first, last in pairwise(firsts)]
        self._first_chunks = [0, *accumulate(chunks)]
        self._first_chunks_W1 = torch.tensor(self._first_chunks, dtype=torch.int32, device=windows.memory_WB.device)

    def draw(self, step: Tensor, own_RV: Tensor, tokens_R: Tensor) -> None:
        """As sampling.draw.draw, on all ranks at once; the tokens are rank 0's. `own_RV` are this rank's logits."""
        own_RC = draw_chunks(step, own_RV, first=self._first)
        best_RC = gather_columns(self._windows, own_RC, self._first_chunks_W1, self._first_chunks)
        if self._windows.rank == 0:
            choose(step, best_RC, tokens_R)
