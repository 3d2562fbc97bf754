"""engine/kernels/ranks/vocabulary.py in Triton's interpreter, a process for each rank: the tokens are those of one."""

import pytest
import torch

from engine.kernels.ranks.vocabulary import VocabularyRanks
from engine.kernels.sampling import draw as drawing
from engine.kernels.sampling.draw import draw
from engine.layers.rank_shard import RankShard
from engine.protocol.types import SamplingParams
from tests.engine.kernels.ranks.test_exchange import on_all, windows
from tests.engine.kernels.sampling.test_draw import step_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a CPU; test_ranks_on_gpus.py has GPUs")
ROWS, VOCABULARY = 8, 101


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("chunk", [drawing.CHUNK, 16])
def test_what_ranks_draw_is_what_one_draws(ranks: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled rows, with ties between ranks, with NaN in one's part, and with nothing that is allowed."""
    monkeypatch.setattr(drawing, "CHUNK", chunk)
    monkeypatch.setattr("engine.kernels.ranks.vocabulary.CHUNK", chunk)
    samplings = [SamplingParams(temperature=row % 3 * 0.8, seed=row) for row in range(ROWS)]
    step = torch.from_numpy(step_of(samplings, [None] * ROWS))
    logits_RV = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    logits_RV[0] = 1.5
    logits_RV[3, [7, 100]] = 9.0
    logits_RV[4, 60] = float("nan")
    logits_RV[5, 100] = float("inf")
    logits_RV[6] = float("-inf")
    wanted_R = torch.zeros(ROWS, dtype=torch.int32)
    draw(step, logits_RV, wanted_R)
    each = windows(ranks)

    def run(rank: int) -> torch.Tensor:
        tokens_R, own = torch.zeros(ROWS, dtype=torch.int32), RankShard(rank, ranks).of(VOCABULARY)
        for _ in range(2):
            VocabularyRanks(each[rank], VOCABULARY).draw(
                step, logits_RV[:, own.start : own.stop].contiguous(), tokens_R
            )
        return tokens_R

    found = on_all(ranks, wanted_R, run)
    assert found[0].tolist() == wanted_R.tolist()
    assert wanted_R[[0, 3, 4, 5, 6]].tolist() == [0, 7, -1, -1, -1]
    assert found[1].tolist() == [0] * ROWS
