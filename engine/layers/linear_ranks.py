"""Linear layers of which each of several ranks has a part, on a CPU: those cut along their inputs, and the head, which
is cut along the vocabulary. It knows no processes: an exchange brings the parts together.

T rows, K inputs of this rank, N outputs, P parts of a sum over all ranks, V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from engine.layers.linear_cpu import CpuLinear
from engine.layers.rank_shard import RankShard


class RankExchange(Protocol):
    """How the ranks' results come together on a CPU (ranks/exchange.py): layer by layer.

    shard      whose part this is.
    own_parts  how many of a sum's parts each rank computes.
    """

    shard: RankShard
    fused: Literal[False]

    @property
    def own_parts(self) -> int: ...

    def gather_parts(self, own: Sequence[Tensor]) -> Tensor: ...

    def gather_columns(self, own_TN: Tensor, first: int, columns: int) -> Tensor: ...


class FusedRankExchange(Protocol):
    """The same on GPUs (ranks/gpu_part.py), where a step adds up all ranks' parts as it norms them: layers give
    their own. The embedding is cut along the vocabulary too, and is one more part."""

    shard: RankShard
    fused: Literal[True]

    def gather_columns(self, own_TN: Tensor, first: int, columns: int) -> Tensor: ...


class LogitsLinear(Protocol):
    """A linear layer that gives logits in one part."""

    bytes: int

    def logits(self, x_TK: Tensor) -> Tensor: ...


class InputShardLinear:
    """A weight cut along its inputs: what it gives are all ranks' parts [P, T, N], to be added up in their order.

    A rank may compute several parts: then the sum's bits are those of as many ranks.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, exchange: RankExchange) -> None:
        """The bias is part of the first rank's first part alone."""
        self._exchange = exchange
        self._parts = [
            CpuLinear(part_NK.contiguous(), bias_N if exchange.shard.rank == index == 0 else None)
            for index, part_NK in enumerate(weight_NK.chunk(exchange.own_parts, 1))
        ]
        self.bytes = sum(part.bytes for part in self._parts)

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._exchange.gather_parts(self.own(x_TK))

    def own(self, x_TK: Tensor) -> list[Tensor]:
        """This rank's parts alone, [T, N] each."""
        widths = [part.inputs for part in self._parts]
        return [part(x_Tk.contiguous()) for part, x_Tk in zip(self._parts, x_TK.split(widths, 1), strict=True)]


class VocabularyShardHead:
    """A head of which this rank has the rows of its part of the vocabulary. The first rank gets all logits, the others
    are left with their own; where each rank draws, nobody needs more.

    own  gives those of this rank's part alone.
    """

    def __init__(self, own: LogitsLinear, exchange: RankExchange | FusedRankExchange, vocabulary: int) -> None:
        self.own = own
        self._exchange = exchange
        self._vocabulary = vocabulary
        self.bytes = own.bytes

    def logits(self, x_TK: Tensor) -> Tensor:
        first = self._exchange.shard.of(self._vocabulary).start
        return self._exchange.gather_columns(self.own.logits(x_TK), first, self._vocabulary)
