"""A loaded model in parts, as schedulers, loops and replicas use them. It does not know on what a model runs."""

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.protocol.reports import MemoryReport
from engine.protocol.types import Pooling, RankLoad
from engine.step.cost_model import CostModel
from engine.step.exchange import BlockExchange
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import Int32s
from engine.step.limits import ExecutorLimits

_TEXT_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json"),
)


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


class ExecutorLost(RuntimeError):
    """An executor computes nothing any more, whatever it is given: its process is to end, and another one to start."""


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
    span            what of a sequence's blocks rows see.
    """

    name: str
    blocks: int
    block_tokens: int
    block_bytes: int
    extent_blocks: int
    min_extents: int
    span: KeySpan = FULL

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


def split_extents(layouts: Items[PagedLayout], more_bytes: int, parts: Items[int]) -> list[int]:
    """How many extents each of several groups gets: what it needs at least, and of so many bytes more what is due to
    its part, which is a weight."""
    whole = sum(parts)
    return [
        min(layout.extents, layout.min_extents + (more_bytes * part // whole) // layout.extent_bytes)
        if layout.extent_bytes
        else layout.extents
        for layout, part in zip(layouts, parts, strict=True)
    ]


class PagedMemory(Protocol):
    """The KV blocks of a decoder, or of a group of its layers. Calls are ordered with launches; only `unmap` waits for
    the device."""

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


class Arrival(Protocol):
    """What was queued, and may not be done yet."""

    def passed(self) -> bool:
        """Whether it is done."""

    def wait(self) -> None:
        """Returns when it is done."""


class CopyOutcome(Enum):
    """How a block's way to a file or back ended: CORRUPT is what is not what was written, LOST what has no file."""

    DONE = 0
    CORRUPT = 1
    LOST = 2


@dataclass(slots=True, eq=False)
class FileCopy:
    """A block of this name on its way between a slot of a BlockTier and a place in BlockFiles."""

    name: bytes
    slot: int
    place: int
    outcome: CopyOutcome = CopyOutcome.LOST


class BlockFiles(Protocol):
    """Files for blocks of a BlockTier, in places of one block each. Threads do the work, in any order but this: what is
    written or erased in one place is so in the order of the calls.

    error   why there are no files any more: nothing is written or read from then on. Empty: there are.
    places  how many there are now, and max_places at most.
    """

    error: str

    @property
    def places(self) -> int: ...

    @property
    def max_places(self) -> int: ...

    def grow(self) -> None:
        """Begins to add some places, unless there are all, or some are under way."""

    def write(self, copy: FileCopy) -> None:
        """Begins to write what the slot holds. It stays as it is until the copy is done."""

    def read(self, copy: FileCopy) -> None:
        """Begins to read into the slot, which nobody else reads or writes until the copy is done."""

    def erase(self, places: Items[int]) -> None:
        """Begins to zero places that nobody reads."""

    def take_done(self) -> list[FileCopy]:
        """The copies that ended since the last call, each with its outcome."""

    def fileno(self) -> int:
        """What is readable when there is something to take."""


class BlockTier(Protocol):
    """Host memory for blocks of the first of a model's memories, in slots. Each call begins behind the launches, and is
    done behind the calls, that came before; the model may sleep meanwhile, for all but loads and stores.

    slots   how many there are now, and max_slots at most.
    files   where its blocks are beside, None: nowhere.
    """

    @property
    def slots(self) -> int: ...

    @property
    def max_slots(self) -> int: ...

    @property
    def files(self) -> BlockFiles | None: ...

    def copied(self) -> Arrival:
        """What is done when all loads and stores are that were called before."""

    def grow(self) -> bool:
        """Adds some slots, in a few milliseconds. Returns False where there are no more to come."""

    def store(self, blocks: Items[int], slots: Items[int]) -> None:
        """Copies what blocks hold into slots, before anything that is queued later changes the blocks."""

    def load(self, slots: Items[int], blocks: Items[int]) -> Arrival:
        """Copies slots into blocks beside later steps, none of which reads or writes these before it is done."""

    def zero(self, slots: Items[int]) -> None:
        """Zeroes slots."""


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
    """Moves a model between device and host memory. Blocks and extents are lists of each group of its KV blocks, and
    none where a model has no paged memory."""

    def prepare(self) -> int:
        """Copies a little of what `sleep` would have to copy, within some milliseconds and beside the steps in flight.
        Returns the bytes copied, 0 when nothing is left. Raises OutOfHostMemory."""

    def sleep(self, keep: Items[Items[int]]) -> int:
        """Gives back all of the device that can be given back, once the steps launched before are done. The host keeps
        the contents of the blocks `keep`; those of all others are lost. Returns the bytes copied.

        Nothing may be launched until `wake`. Raises OutOfHostMemory; nothing has moved then.
        """

    def wake(self, extents: Items[Items[int]], restore: Items[Items[int]]) -> int:
        """Takes the device again with these extents mapped, and restores what `sleep` kept into the blocks `restore`,
        in the same order. Returns the bytes copied. Steps may be launched at once; they wait where they have to.

        Raises OutOfDeviceMemory, and then the model sleeps as before; CheckpointError where it reads files again.
        """

    def arrived(self) -> bool:
        """Whether everything that `wake` brings back is there."""

    def usage(self) -> MemoryUsage:
        """What the model holds now, awake or asleep."""


class EncoderAsleep(Exception):
    """What encodes images has no parameters at this moment: they are there again when the model is awake."""


class ImageEncoder(Protocol):
    """What turns images into rows that a decoder takes in place of embeddings. `encode` may be called by another thread
    than the executor's, one at a time.

    side      of an image in pixels,
    tokens    that it becomes,
    token     the id that stands for them.
    together  how many images are best encoded at once.
    """

    side: int
    tokens: int
    token: int
    together: int

    def encode(self, images: Items[bytes]) -> list[NDArray[np.float32]]:
        """[tokens, hidden] for each image of side · side · 3 bytes, row by row, the three numbers of a pixel together.
        A result does not depend on the other images; on a GPU its last bits may. Raises EncoderAsleep."""

    def place(self, rows_NH: NDArray[np.float32], row: int) -> None:
        """Puts rows into the executor's buffer, from `row` on, for the next launch, which leaves none of them there."""


class DecoderExecutor(StepExecutor, MaskedSampler, Protocol):
    """Both sides of computing a decoder's steps."""


class DecoderMemory(Sleeper, Protocol):
    """Both sides of a decoder's memory: what sleeps, and LoadedModel's `memories`, `tier` and `images`."""

    memories: tuple[PagedMemory, ...]

    @property
    def tier(self) -> BlockTier | None: ...

    @property
    def images(self) -> ImageEncoder | None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An open model: its parts, for those who use them, and one `close`.

    revision    names the weights; KV of other revisions must not be used.
    stop_ids    tokens that end a sequence, from the model's own configuration.
    poolings    the vectors that it gives; none where it gives text.
    sampler     None where no row of a step can have a mask.
    memories    of each group of KV blocks, that of the layers that see everything first (its blocks are there, and have
                no bytes, where no layer does); none where nothing is kept between steps, as in an encoder.
    report      where memory went as the model was opened.
    resources   closes what the model holds, the last opened first.
    tier        host memory for blocks that do not fit on the device, None where it has none.
    exchange    how its blocks go to other replicas, None where they cannot.
    rank_loads  what each of its ranks has done so far; none where it has one.
    devices     that it is on: each holds what `memories` say, and has its part of what the host keeps.
    parts       that each sum over its ranks has: another number of them rounds otherwise.
    images      what encodes images of prompts, None where it takes text alone; a thread that calls it enters a
                compute_context.
    """

    revision: str
    stop_ids: frozenset[int]
    poolings: frozenset[Pooling]
    executor: StepExecutor
    sampler: MaskedSampler | None
    memories: tuple[PagedMemory, ...]
    sleeper: Sleeper
    report: MemoryReport
    resources: ExitStack
    tier: BlockTier | None = None
    exchange: BlockExchange | None = None
    rank_loads: Callable[[], list[RankLoad]] = list
    devices: int = 1
    parts: int = 1
    images: ImageEncoder | None = None
    compute_context: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def paged(self) -> PagedMemory | None:
        """The first of `memories`, whose blocks are those of the prefix tree."""
        return self.memories[0] if self.memories else None

    def digest(self, folder: Path) -> str:
        """What replicas have in common that give the same tokens for the same prompt: weights, how text becomes tokens
        and prompts by the model's folder, and how KV is laid out; behind a "/" in how many parts sums are added up,
        unless in one. Where that alone differs tokens are the same but for rounding."""
        digest = hashlib.sha256("\n".join([self.revision, *(each.layout.name for each in self.memories)]).encode())
        for name in _TEXT_FILES:
            if (path := folder / name).exists():
                digest.update(f"\n{name} {path.stat().st_size}\n".encode() + path.read_bytes())
        return digest.hexdigest()[:16] + (f"/{self.parts}" if self.parts > 1 else "")

    def close(self) -> None:
        """Gives back all memory of device and host when the launched steps are done. Nothing else may be called
        afterwards; closing again does nothing."""
        self.resources.close()
