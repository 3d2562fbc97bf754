"""Runs steps of an encoder: takes packed texts, gives a vector for each. It knows no network.

On a GPU launching does not wait: the next step is packed while this one is computed. Encoders are small: one that
sleeps leaves its weights to the page cache, on a GPU too, and reads them again when it wakes.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execution.memory_plan import CONTEXT_BYTES
from engine.memory.errors import OutOfDeviceMemory
from engine.memory.streams import DeviceStream, StreamEvent, trim_memory
from engine.models.bert import BertEncoder
from engine.step.cost_model import CostModel
from engine.step.encoder_layout import unpack_texts
from engine.step.executor import InflightStep, MemoryUsage, RunnerOutput
from engine.step.layout import Int32s
from engine.step.limits import ExecutorLimits
from engine.step.sampling import pooling_output


@dataclass(frozen=True, slots=True)
class InflightVectors:
    """A step's vectors on their way to the host."""

    vectors_SH: Tensor
    mark: StreamEvent

    def wait(self) -> RunnerOutput:
        self.mark.wait()
        return pooling_output(self.vectors_SH)


class EncoderMemory:
    """An encoder's Sleeper. It keeps nothing between steps.

    encoder     the model, None while it sleeps.
    """

    def __init__(
        self, encoder: BertEncoder, load: Callable[[], BertEncoder], weights_bytes: int, stream: DeviceStream
    ) -> None:
        """`load` reads the files again at each wake."""
        self.encoder: BertEncoder | None = encoder
        self.stream = stream
        self._load = load
        self._weights_bytes = weights_bytes

    def prepare(self) -> int:
        """Copies nothing: weights come from their files again."""
        return 0

    def sleep(self, keep: Items[Items[int]]) -> int:
        """Drops the weights."""
        assert not any(keep), "an encoder has no blocks"
        self.close()
        return 0

    def close(self) -> None:
        """Gives everything back. It may be called again."""
        self.stream.wait()
        self.encoder = None
        trim_memory(self.stream.device)

    def wake(self, extents: Items[Items[int]], restore: Items[Items[int]]) -> int:
        """As in Sleeper: reads the weights again. Returns their bytes."""
        assert self.encoder is None, "awake already"
        try:
            with self.stream.entered():
                self.encoder = self._load()
        except OutOfDeviceMemory:
            trim_memory(self.stream.device)
            raise
        return self._weights_bytes

    def arrived(self) -> bool:
        """True: `wake` returns when everything is there."""
        return True

    def usage(self) -> MemoryUsage:
        """As in Sleeper. On a GPU a model holds what torch has got, and what the driver keeps for the process."""
        held_bytes, asleep_bytes = self._weights_bytes, 0
        if self.stream.queues:
            held_bytes, asleep_bytes = torch.cuda.memory_reserved(self.stream.device), CONTEXT_BYTES
        return MemoryUsage(
            device_bytes=asleep_bytes + (held_bytes if self.encoder is not None else 0),
            asleep_bytes=asleep_bytes,
            min_bytes=asleep_bytes + self._weights_bytes,
            max_bytes=asleep_bytes + max(held_bytes, self._weights_bytes),
            memory_bytes=0,
            weights_bytes=self._weights_bytes,
            kv_bytes=0,
            kept_bytes=0,
            standby_bytes=0,
        )


class EncoderRunner:
    """An encoder's StepExecutor, on a CPU or a GPU."""

    costs: CostModel | None = None

    def __init__(self, memory: EncoderMemory, limits: ExecutorLimits, beat: Callable[[], None]) -> None:
        self.limits = limits
        self._memory = memory
        self._stream = memory.stream
        self._beat = beat

    def launch(self, packed: Int32s) -> InflightStep:
        encoder = self._memory.encoder
        assert encoder is not None, "asleep"
        texts = unpack_texts(packed)
        assert max(texts.lengths) <= self.limits.context_tokens, "a text past the context"
        assert 0 <= texts.tokens_T.min() <= texts.tokens_T.max() < self.limits.vocabulary, "a token past the vocabulary"
        mark = self._stream.mark()
        with self._stream.entered():
            vectors_SH = encoder.vectors(texts, self._beat)
            if self._stream.queues:
                host_SH = self._stream.staging(*vectors_SH.shape, dtype=torch.float32)
                vectors_SH = host_SH.copy_(vectors_SH, non_blocking=True)
            mark.set()
        return InflightVectors(vectors_SH, mark)

    def warm_up(self) -> bool:
        """Returns False: there is nothing to prepare."""
        return False
