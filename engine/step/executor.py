"""A loaded model in parts, as schedulers, loops and replicas use them. It does not know on what a model runs."""

from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.protocol.reports import MemoryReport
from engine.protocol.types import Pooling
from engine.step.cost_model import CostModel
from engine.step.layout import ExecutorLimits, Int32s


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The result of a step, row by row in the order of `rows_R`.

    tokens_R    −1 where a row's logits were not finite: what its sequence reads is not to be trusted.
    logprobs    of each row that asked for them: (chosen token's logprob, top ids, top logprobs), best first.
    vectors_RH  the rows' vectors, from a model that gives vectors; its tokens only say whether these are finite.
    """

    tokens_R: Int32s
    logprobs: dict[int, tuple[float, list[int], list[float]]]
    vectors_RH: NDArray[np.float32] | None = None


class InflightStep(Protocol):
    """A step that was launched and is not yet committed."""

    def wait(self) -> RunnerOutput:
        """Blocks until the step is done. Called once. May raise OutOfDeviceMemory."""


class StepExecutor(Protocol):
    """Computes packed steps in launch order. One thread owns it.

    costs   how long steps take, where that was measured.
    """

    limits: ExecutorLimits
    costs: CostModel | None

    def launch(self, packed: Int32s) -> InflightStep:
        """Begins a step, after those launched before. A step with masked rows computes them and waits for its masks.

        May raise OutOfDeviceMemory; nothing is launched then.
        """

    def warm_up(self) -> bool:
        """Prepares a little of what makes later steps or a later sleep faster, in some 10 ms, while nothing runs.
        Returns False when nothing is left to prepare."""


class MaskedSampler(Protocol):
    """Samples the rows of a launched step that wait for masks."""

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        """Gives a step its masks, a row for each of its masked rows: before the next launch, and before the step is
        waited for unless nobody wants its result any more. May raise OutOfDeviceMemory."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """How a KV cache is cut into blocks, and blocks into extents, which get memory and give it back as a whole.

    name            the meaning of a block's bytes: caches may exchange blocks only where it is equal.
    blocks          tables may name 0 … blocks−1, as far as their extent is mapped.
    block_tokens    tokens in a block; block_bytes over all layers.
    extent_blocks   blocks in an extent; the last extent may have fewer.
    min_extents     extents that are mapped whenever the model is awake.
    """

    name: str
    blocks: int
    block_tokens: int
    block_bytes: int
    extent_blocks: int
    min_extents: int

    @property
    def extents(self) -> int:
        return -(-self.blocks // self.extent_blocks)

    @property
    def extent_bytes(self) -> int:
        return self.extent_blocks * self.block_bytes

    @property
    def min_blocks(self) -> int:
        """How many blocks have memory whenever the model is awake."""
        return min(self.min_extents * self.extent_blocks, self.blocks)


class PagedMemory(Protocol):
    """The KV blocks of a decoder. Calls are ordered with launches; only `unmap` waits for the device."""

    layout: PagedLayout

    @property
    def mapped(self) -> list[int]:
        """The extents that have memory, ascending."""

    def zero(self, blocks: Items[int]) -> None:
        """Zeroes these blocks in all layers; while the model sleeps, the host's copies of them."""

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        """Copies whole blocks in all layers. No target is also a source."""

    def map(self, extents: Items[int]) -> None:
        """Gives these extents memory with undefined content. Raises OutOfDeviceMemory; none of them has any then."""

    def unmap(self, extents: Items[int]) -> None:
        """Zeroes these extents and gives their memory back. No step in flight reads or writes them."""


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """What a model holds and needs, in bytes.

    device_bytes    held now; asleep_bytes of them also while it sleeps.
    min_bytes       held at least while it is awake, with as little KV as it can serve with; max_bytes at most.
    memory_bytes    held of host memory; kept_bytes of them are KV.
    weights_bytes   of the weights, and kv_bytes of the mapped KV, on the device.
    standby_bytes   of host memory that a sleeping model holds at most.
    """

    device_bytes: int
    asleep_bytes: int
    min_bytes: int
    max_bytes: int
    memory_bytes: int
    weights_bytes: int
    kv_bytes: int
    kept_bytes: int
    standby_bytes: int


class Sleeper(Protocol):
    """Moves a model between device and host memory. Blocks and extents are empty where a model has no paged memory."""

    def prepare(self) -> int:
        """Copies a little of what `sleep` would have to copy, within some milliseconds and beside the steps in flight.
        Returns the bytes copied, 0 when nothing is left. Raises OutOfHostMemory."""

    def sleep(self, keep: Items[int]) -> int:
        """Gives back all of the device that can be given back, once the steps launched before are done. The host keeps
        the contents of the blocks `keep`; those of all others are lost. Returns the bytes copied.

        Nothing may be launched until `wake`. Raises OutOfHostMemory; nothing has moved then.
        """

    def wake(self, extents: Items[int], restore: Items[int]) -> int:
        """Takes the device again with these extents mapped, and restores what `sleep` kept into the blocks `restore`,
        in the same order. Returns the bytes copied. Steps may be launched at once; they wait where they have to.

        Raises OutOfDeviceMemory, and then the model sleeps as before; CheckpointError where it reads files again.
        """

    def arrived(self) -> bool:
        """Whether everything that `wake` brings back is there."""

    def usage(self) -> MemoryUsage:
        """What the model holds now, awake or asleep."""


class DecoderExecutor(StepExecutor, MaskedSampler, Protocol):
    """Both sides of computing a decoder's steps."""


class DecoderMemory(PagedMemory, Sleeper, Protocol):
    """Both sides of a decoder's memory."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An open model: its parts, for those who use them, and one `close`.

    revision    names the weights; KV of other revisions must not be used.
    stop_ids    tokens that end a sequence, from the model's own configuration.
    poolings    the vectors that it gives; none where it gives text.
    sampler     None where no row of a step can have a mask.
    paged       None where nothing is kept between steps, as in an encoder.
    report      where memory went as the model was opened.
    resources   closes what the model holds, the last opened first.
    """

    revision: str
    stop_ids: frozenset[int]
    poolings: frozenset[Pooling]
    executor: StepExecutor
    sampler: MaskedSampler | None
    paged: PagedMemory | None
    sleeper: Sleeper
    report: MemoryReport
    resources: ExitStack

    def close(self) -> None:
        """Gives back all memory of device and host when the launched steps are done. Nothing else may be called
        afterwards; closing again does nothing."""
        self.resources.close()
