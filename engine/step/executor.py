"""Who computes packed steps, as schedulers and loops see it. It does not know on what."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.step.cost_model import CostModel
from engine.step.layout import Int32s


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What a step gives back, row by row in the order of `rows_R`.

    A token of −1: the row's logits were not finite. What its sequence reads is not to be trusted.
    `logprobs` maps a row that asked to (chosen token's logprob, top ids, top logprobs), best first.
    `vectors_RH` are what the rows of a model that gives vectors became; its tokens say no more than whether these are
    finite.
    """

    tokens_R: Int32s
    logprobs: dict[int, tuple[float, list[int], list[float]]]
    vectors_RH: NDArray[np.float32] | None = None


class InflightStep(Protocol):
    """A batch launched and not yet committed."""

    def wait(self) -> RunnerOutput:
        """Blocks until the step is done. Called once. May raise OutOfDeviceMemory."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """What a runner holds and needs, in bytes, as in wire.Placed. `extent_bytes` is one extent of its KV; asleep it
    holds asleep_bytes of the device, and awake at the least least_bytes, with `extents_least` extents of KV."""

    device_bytes: int
    asleep_bytes: int
    least_bytes: int
    most_bytes: int
    memory_bytes: int
    weights_bytes: int
    kv_bytes: int
    kept_bytes: int
    standby_bytes: int
    extent_bytes: int
    extents_least: int


class StepExecutor(Protocol):
    """What the loop asks of a runner; the stamp engine of the tests is another one.

    blocks              tables may name 0 … blocks−1, of those whose extent is mapped: a run of extent_blocks of them,
                        the last may be shorter, that gets memory or gives it back as a whole.
    mapped              the extents that have memory, ascending.
    depth               launches that may be in the air at once: 1, or 2 where launching does not wait for the step.
    costs               what steps take, where that was measured.
    step_tokens         the most rows of a step in which some sequence decodes,
    prompt_step_tokens  and of one in which none does.
    sequences           how many may run at once.
    """

    blocks: int
    extent_blocks: int
    block_tokens: int
    depth: int
    costs: CostModel | None
    step_tokens: int
    prompt_step_tokens: int
    sequences: int

    def launch(self, packed: Int32s) -> InflightStep:
        """Begins a step, after those launched before. One with masked rows computes them, and waits for their masks.
        May raise OutOfDeviceMemory."""
        ...

    def sample(self, flight: InflightStep, masks_MW: Int32s) -> None:
        """Gives a flight its masks: before it is waited for, unless nobody wants what it computes any more, and before
        the next launch. May raise OutOfDeviceMemory."""
        ...

    @property
    def mapped(self) -> list[int]: ...

    def erase(self, blocks: Items[int]) -> None:
        """Zeroes these blocks in all layers: after the steps launched before, and before those launched later. Asleep,
        what is kept of them in host memory."""
        ...

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        """Copies whole blocks in all layers, in the order of launches like `erase`. No target is a source."""
        ...

    def map(self, extents: Items[int]) -> None:
        """Gives these extents memory: what is in it is anything. Steps in the air go on. Raises OutOfDeviceMemory, and
        then none of them has got any."""
        ...

    def unmap(self, extents: Items[int]) -> None:
        """Gives their memory back, to whomever wants it. No step in the air reads or writes them."""
        ...


class SleepableExecutor(StepExecutor, Protocol):
    """What moving asks of a runner, beside what the loop does."""

    def prepare(self) -> int:
        """Copies a little of what `sleep` would have to copy, within some milliseconds and beside the steps in the air;
        gives its bytes, 0 where all is copied. Raises OutOfHostMemory."""
        ...

    def sleep(self, kept: Items[int]) -> int:
        """Gives back all of the device that can be given back, once the steps launched before are done. The contents of
        these blocks are kept in host memory, of all others lost. Gives how many bytes were copied.

        Nothing may be launched until `wake`. Raises OutOfHostMemory, and then it is awake as before.
        """
        ...

    def wake(self, extents: Items[int], restored: Items[int]) -> int:
        """Takes the device again with these extents mapped, and puts what was kept into these blocks, in the order in
        which `sleep` was told to keep it; gives how many bytes that copies. Steps may be launched at once, they wait
        where they have to; `arrived` says when all is there.

        Raises OutOfDeviceMemory, and then it sleeps as before; CheckpointError where it reads files again.
        """
        ...

    def arrived(self) -> bool: ...

    def sizes(self) -> MemoryUsage:
        """What it holds now, awake or asleep."""
        ...
