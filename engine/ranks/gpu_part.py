"""One rank's part of a model on GPUs: what ranks tell each other before anything is loaded, the windows that they
share, and what opening and computing need of that. It knows no commands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor

from engine.execution.device_select import device_facts
from engine.execution.gpu_memory import GpuMemory
from engine.execution.memory_plan import DoesNotFit
from engine.kernels.ranks.exchange import RankWindows, gather_columns
from engine.layers.rank_shard import RankShard
from engine.memory.streams import DeviceStream
from engine.memory.symmetric import SwapDescriptors, share_windows, window_driver
from engine.models.decoders import DecoderParameters
from engine.protocol.specs import ModelSpec
from engine.step.executor import DecoderMemory
from engine.step.order import StepAnnouncer
from engine.weights.source import ShardSource, WeightSource

WINDOW_BYTES: Final = 48 << 20  # of each rank, asleep too
BeginFollowing = Callable[[GpuMemory, Sequence[int]], DecoderMemory]


class RankFacts(msgspec.Struct, frozen=True):
    """The GPU of one rank. `reaches`: the ranks whose memory it can map."""

    rank: int
    name: str
    total_bytes: int
    free_bytes: int
    reaches: list[int]


def facts_of(rank: int, ranks: int, device: torch.device) -> RankFacts:
    name, free_bytes, total_bytes = device_facts(device)
    others = [other for other in range(ranks) if other != rank]
    if device.type == "cuda":
        others = [other for other in others if torch.cuda.can_device_access_peer(rank, other)]
    return RankFacts(rank, name, total_bytes, free_bytes, others)


def require_alike(model: str, facts: Sequence[RankFacts]) -> None:
    """Raises DoesNotFit where the GPUs of a model's ranks are not of one kind, or one does not reach another."""
    first = facts[0]
    for other in facts[1:]:
        if other.name != first.name:
            raise DoesNotFit(
                f"{model}: its GPUs are not alike, {first.name} and {other.name}: show it those of one kind "
                "(CUDA_VISIBLE_DEVICES), or set gpus to fewer"
            )
    for own in facts:
        for other in facts:
            if other is not own and other.rank not in own.reaches:
                raise DoesNotFit(
                    f"{model}: GPU {own.rank} of those that it has does not reach the memory of GPU {other.rank} (no "
                    "peer access): `nvidia-smi topo -p2p r` says which pairs do; choose such, or set gpus to fewer"
                )


def require_room(model: str, facts: Sequence[RankFacts], weights_bytes: int) -> None:
    """Raises DoesNotFit where a GPU has no room for its part of the weights, so many bytes, and for its window: before
    one of them is read."""
    for own in facts:
        if own.free_bytes < weights_bytes + WINDOW_BYTES:
            raise DoesNotFit(
                f"{model}: {weights_bytes / 1e9:.1f} GB of weights are to go to GPU {own.rank} of those that it has, "
                f"{own.free_bytes / 1e9:.1f} of {own.total_bytes / 1e9:.1f} GB are free there: other processes hold "
                "the rest (`nvidia-smi` says which); end them, or set gpus to more"
            )


class GpuExchange:
    """How ranks on GPUs come together where a step's kernels do not do it themselves (a FusedRankExchange)."""

    def __init__(self, windows: RankWindows, vocabulary: int) -> None:
        self.shard = RankShard(windows.rank, windows.ranks)
        self.fused: Literal[True] = True
        self._windows = windows
        shards = [RankShard(rank, windows.ranks) for rank in range(windows.ranks)]
        self._firsts = [*(shard.of(vocabulary).start for shard in shards), vocabulary]
        self._firsts_W1 = torch.tensor(self._firsts, dtype=torch.int32, device=windows.memory_WB.device)

    def gather_columns(self, own_TN: Tensor, first: int, columns: int) -> Tensor:
        """As in HostExchange."""
        assert (first, columns) == (self._firsts[self.shard.rank], self._firsts[-1])
        return gather_columns(self._windows, own_TN, self._firsts_W1, self._firsts)


@dataclass(slots=True)
class GpuRankPart:
    """A RankPart of engine/execution/gpu_model.py. `begin` is rank 0's alone."""

    model: ModelSpec
    source: ShardSource
    exchange: GpuExchange
    windows: RankWindows
    announcer: StepAnnouncer | None
    arena_bytes: int
    scarce_bytes: int = 0
    begin_following: BeginFollowing | None = None

    def load_parameters(self, beat: Callable[[], None], into: dict[str, Tensor]) -> DecoderParameters:
        return self.source.load(self.exchange, beat, into)

    def begin(self, memory: GpuMemory, segments: Sequence[int]) -> DecoderMemory:
        assert self.begin_following is not None
        return self.begin_following(memory, segments)


def open_part(
    share: ModelSpec, source: WeightSource, rank: int, ranks: int, arena_bytes: int, swap: SwapDescriptors,
    announcer: StepAnnouncer | None = None, scarce_bytes: int = 0, begin_following: BeginFollowing | None = None,
) -> GpuRankPart:  # fmt: skip
    """Cuts the source and shares windows with the other ranks, which do so at the same time. `share` is what the spec
    means for one rank. Raises CannotShard, OutOfDeviceMemory, and what `swap` raises."""
    shard = source.cut(RankShard(rank, ranks), cut_embedding=True)
    memory_WB = share_windows(window_driver(source.device), WINDOW_BYTES, rank, ranks, swap)
    windows = RankWindows(memory_WB, rank)
    return GpuRankPart(
        share, shard, GpuExchange(windows, source.config.vocabulary), windows, announcer, arena_bytes, scarce_bytes,
        begin_following,
    )  # fmt: skip


class WaitEnder:
    """Ends the waits of this rank's kernels for other ranks, whatever is queued before. All that it needs is made
    ahead: a device whose kernels wait for ever may give nothing any more."""

    def __init__(self, windows: RankWindows) -> None:
        self._windows = windows
        self._stream = DeviceStream(windows.memory_WB.device)
        self._one = torch.ones(1, dtype=torch.int64, pin_memory=self._stream.queues)

    def end(self) -> None:
        """To be called by any thread: windows are tensors that nothing but inference may write."""
        with torch.inference_mode(), self._stream.entered():
            self._windows.abort_1.copy_(self._one, non_blocking=True)
        self._stream.wait()
