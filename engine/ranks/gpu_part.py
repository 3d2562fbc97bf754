"""One rank's part of a model on GPUs: what ranks tell each other before anything is loaded, the windows that they
share, and what opening and computing need of that. It knows no commands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor

from engine.execution.device_select import device_facts
from engine.execution.gpu_memory import GpuMemory, StepLimits
from engine.execution.gpu_model import DecoderRunner, GpuModel
from engine.execution.memory_plan import DoesNotFit
from engine.kernels.ranks.gather import DATA_BEGINS, RankWindows, gather_columns
from engine.layers.rank_shard import RankShard
from engine.memory.streams import DeviceStream
from engine.memory.symmetric import SwapDescriptors, share_windows, window_driver
from engine.models.decoders import DecoderParameters
from engine.pipeline.stage_part import KEPT_STEPS, Lead, StagePart, bytes_of_mails, mails_of
from engine.pipeline.stage_plan import PoolSizes, StageRoom, stage_shares
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
                "(CUDA_VISIBLE_DEVICES), or set gpus or stages to fewer"
            )
    for own in facts:
        for other in facts:
            if other is not own and other.rank not in own.reaches:
                raise DoesNotFit(
                    f"{model}: GPU {own.rank} of those that it has does not reach the memory of GPU {other.rank} (no "
                    "peer access): `nvidia-smi topo -p2p r` says which pairs do; choose such, or set gpus or stages to "
                    "fewer"
                )


def require_room(model: str, facts: Sequence[RankFacts], weights: Sequence[int], window_bytes: int) -> None:
    """Raises DoesNotFit where a GPU has no room for its part of the weights, so many bytes on each, and for its window:
    before one of them is read."""
    for own, weights_bytes in zip(facts, weights, strict=True):
        if own.free_bytes < weights_bytes + window_bytes:
            raise DoesNotFit(
                f"{model}: {weights_bytes / 1e9:.1f} GB of weights are to go to GPU {own.rank} of those that it has, "
                f"{own.free_bytes / 1e9:.1f} of {own.total_bytes / 1e9:.1f} GB are free there: other processes hold "
                "the rest (`nvidia-smi` says which); end them, or set gpus or stages to more"
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
    """A RankPart of engine/execution/gpu_model.py.

    stages     what it has of them, where there are several.
    rooms      what the GPUs of other ranks have beside that of rank 0.
    begin_following, announcer, lead   are rank 0's alone; `lead` is told of what runs steps there.
    """

    model: ModelSpec
    source: ShardSource | WeightSource
    exchange: GpuExchange
    windows: RankWindows
    arena_bytes: int
    stages: StagePart | None = None
    sizes: PoolSizes = ()
    rooms: Sequence[StageRoom] = ()
    announcer: StepAnnouncer | None = None
    begin_following: BeginFollowing | None = None
    lead: Lead = lambda runner: None

    @property
    def kept_steps(self) -> int:
        return 0 if self.stages is None else KEPT_STEPS

    def launch_limits(self, limits: StepLimits, context_tokens: int) -> StepLimits:
        if self.stages is None:
            return limits
        groups = len(self.source.config.kv_groups)
        return self.stages.launch_limits(self.model, limits, context_tokens, groups)

    def load_parameters(self, beat: Callable[[], None], into: dict[str, Tensor]) -> DecoderParameters:
        if isinstance(self.source, WeightSource):
            return self.source.load(beat, into)
        return self.source.load(self.exchange, beat, into)

    def kv_room(self, room_bytes: int, free_bytes: int) -> tuple[int, int]:
        rooms = [room.of(room_bytes) for room in self.rooms]
        return min([room_bytes, *rooms]), min([free_bytes, *(room.of_free(free_bytes) for room in self.rooms)])

    def begin(self, memory: GpuMemory, segments: Sequence[int]) -> DecoderMemory:
        assert self.begin_following is not None
        return self.begin_following(memory, segments)

    def pipeline(self, opened: GpuModel, graph_rows: int) -> DecoderRunner | None:
        if self.stages is None:
            return None
        assert self.announcer is not None
        return self.stages.pipeline(opened, graph_rows, self.announcer, self.lead)


def open_part(
    model: ModelSpec, source: WeightSource, rank: int, arena_bytes: int, swap: SwapDescriptors, sizes: PoolSizes = ()
) -> GpuRankPart:
    """Cuts the source and shares windows with the other ranks, which do so at the same time. `sizes` are those of the
    stages' pools. Raises CannotShard, DoesNotFit, OutOfDeviceMemory, and what `swap` raises."""
    gpus, (stage, number) = model.gpus, divmod(rank, model.gpus)
    share, mails = stage_shares(model, source, number)[stage], mails_of(model, source.config.hidden)
    size = window_bytes(model, source.config.hidden)
    all_WB = share_windows(window_driver(source.device), size, rank, gpus * model.stages, swap)
    own_WB = all_WB[stage * gpus : (stage + 1) * gpus]
    windows = RankWindows(own_WB, number, own_WB.shape[1] - sums_bytes(model))
    part = GpuRankPart(
        share.model, share.source, GpuExchange(windows, source.config.vocabulary), windows, arena_bytes, sizes=sizes
    )
    if mails:
        part.stages = StagePart.of(model, all_WB, rank, sums_bytes(model), mails)
    return part


def sums_bytes(model: ModelSpec) -> int:
    """What the ranks of a stage exchange sums in, of each window."""
    return WINDOW_BYTES if model.gpus > 1 else DATA_BEGINS


def window_bytes(model: ModelSpec, hidden: int) -> int:
    """What each rank's window takes, mails between stages included. Raises DoesNotFit."""
    return sums_bytes(model) + bytes_of_mails(mails_of(model, hidden))


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
