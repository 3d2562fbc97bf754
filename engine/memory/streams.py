"""The order in which a device works: one stream, marks in it to wait for, and host memory that it copies by itself.

It is the one place that tells a GPU from a device that computes at once, as a CPU does when it tries the GPU's path.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from engine.memory.errors import OutOfDeviceMemory
from engine.process.allocator import trim_heap


class DeviceStream:
    """Everything for one device is queued here, in the order of the calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queues = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.queues else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What torch computes within it is queued here. Raises OutOfDeviceMemory where torch gets too little."""
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                yield
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error

    def mark(self) -> "StreamEvent":
        return StreamEvent(self._stream)

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device reads and writes by itself."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=self.queues)

    def pinned(self, numbers: Items[int] | Tensor) -> Tensor:
        """Ids (int64) in host memory, from where a copy does not wait for what is queued before it."""
        host = torch.as_tensor(numbers, dtype=torch.int64)
        return host.pin_memory() if self.queues else host

    def follow(self, mark: "StreamEvent") -> None:
        """What is queued from now on comes behind a mark of another stream."""
        if self._stream is not None and mark.event is not None:
            self._stream.wait_event(mark.event)

    def wait(self) -> None:
        """Until all that is queued is done."""
        if self._stream is not None:
            self._stream.synchronize()


class StreamEvent:
    """A place in a stream: `set` puts it behind what is queued, `wait` sleeps until the device has come to it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self.event = None if stream is None else torch.cuda.Event(enable_timing=True, blocking=True)

    def set(self) -> None:
        if self.event is not None:
            self.event.record(self._stream)

    def wait(self) -> None:
        """Returns at once where it was never set."""
        if self.event is not None:
            self.event.synchronize()

    def passed(self) -> bool:
        """Whether the device has come to it."""
        return self.event is None or bool(self.event.query())

    def ms_since(self, earlier: "StreamEvent") -> float:
        """What the device took from there to here; both must have been reached. 0 where nothing is queued."""
        if self.event is None or earlier.event is None:
            return 0.0
        return float(earlier.event.elapsed_time(self.event))


def trim_memory(device: torch.device) -> None:
    """Returns memory to the system that was freed, and that torch or the C library keep for later allocations."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    else:
        trim_heap()
