"""A decoder on a CPU: its steps, where launching computes, and its memory, of which the KV pool takes more as it fills.

Asleep it holds no parameters: the page cache has the files that they are read from again.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.hostinfo.memory import available_memory_bytes
from engine.kvcache.tensors import KVPool
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.memory.streams import trim_memory
from engine.models.config import ModelConfig
from engine.models.cpu_step import CpuStep
from engine.models.llama import DecoderParameters, LlamaDecoder, rope_tables
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, MemoryUsage, PagedLayout, RunnerOutput
from engine.step.layout import ExecutorLimits, Int32s, StepBatch, check_step, unpack_step
from engine.step.sampling import pooling_output, sample_batch
from engine.weights.assembly import weights_bytes

_CPU: Final = torch.device("cpu")


class CpuMemory:
    """A model's PagedMemory and Sleeper on a CPU.

    decoder     the model, None while it sleeps.
    """

    def __init__(
        self, parameters: DecoderParameters, load: Callable[[], DecoderParameters], pool: KVPool, layout: PagedLayout,
        standby_bytes: int,
    ) -> None:  # fmt: skip
        """`load` reads the parameters again at each wake; standby_bytes of KV at most are kept while it sleeps."""
        self.decoder: LlamaDecoder | None = LlamaDecoder(parameters)
        self.pool = pool
        self.layout = layout
        self.map = pool.map
        self.unmap = pool.unmap
        self.weights_bytes = weights_bytes(parameters)
        self._load = load
        self._standby_bytes = standby_bytes
        self._kept_blocks: list[int] = []
        self._kept_LBW = torch.empty(0, dtype=torch.uint8)

    @property
    def mapped(self) -> list[int]:
        return self.pool.mapped

    def zero(self, blocks: Items[int]) -> None:
        if self.decoder is not None:
            self.pool.erase(torch.tensor(blocks, dtype=torch.int64))
            return
        for block in blocks:
            self._kept_LBW[:, self._kept_blocks.index(block)] = 0

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        self.pool.copy(*(torch.tensor(blocks, dtype=torch.int64) for blocks in (sources, targets)))

    def prepare(self) -> int:
        """Copies nothing: weights come from their files again."""
        return 0

    def sleep(self, keep: Items[int]) -> int:
        """Drops the parameters, and of the pool all but these blocks. Returns their bytes. Raises OutOfHostMemory."""
        assert self.decoder is not None, "asleep already"
        shape, count = self.pool.shape, len(keep)
        if count * shape.block_bytes > available_memory_bytes():
            raise OutOfHostMemory(f"{count * shape.block_bytes / 1e6:.0f} MB of KV to keep are more than what is free")
        kept_LBW = torch.empty(shape.layers, count, shape.layer_block_bytes, dtype=torch.uint8)
        for layer in range(shape.layers if keep else 0):
            self.pool.take(layer, torch.tensor(keep), kept_LBW[layer])
        self._kept_blocks, self._kept_LBW = list(keep), kept_LBW
        self.decoder = None
        self.pool.unmap(self.pool.mapped)
        trim_memory(_CPU)
        return kept_LBW.nbytes

    def wake(self, extents: Items[int], restore: Items[int]) -> int:
        """As in Sleeper: reads the parameters again. Returns their bytes and those restored."""
        assert self.decoder is None, "awake already"
        free = available_memory_bytes()
        if self.weights_bytes > free:
            raise OutOfDeviceMemory(
                f"{self.weights_bytes / 1e6:.0f} MB of weights are more than the {free / 1e6:.0f} free"
            )
        decoder = LlamaDecoder(self._load())
        self.pool.map(extents)
        kept_LBW = self._kept_LBW
        for layer in range(len(kept_LBW) if restore else 0):
            self.pool.put(layer, torch.tensor(restore), kept_LBW[layer])
        kept_LBW.zero_()  # what was restored may be zeroed from now on
        self.decoder, self._kept_blocks, self._kept_LBW = decoder, [], kept_LBW.new_empty(0)
        return self.weights_bytes + kept_LBW.nbytes

    def arrived(self) -> bool:
        """True: `wake` returns when everything is there."""
        return True

    def close(self) -> None:
        """Gives everything back. It may be called again."""
        self.decoder, self._kept_blocks, self._kept_LBW = None, [], self._kept_LBW.new_empty(0)
        self.pool.unmap(self.pool.mapped)
        trim_memory(_CPU)

    def usage(self) -> MemoryUsage:
        """As in Sleeper. `device_bytes` is what steps read and write; the page cache, which the system takes back as it
        likes, counts for nobody."""
        weights_bytes, layout, awake = self.weights_bytes, self.layout, self.decoder is not None
        kv_bytes = len(self.pool.mapped) * layout.extent_bytes
        return MemoryUsage(
            device_bytes=weights_bytes + kv_bytes if awake else 0,
            asleep_bytes=0,
            min_bytes=weights_bytes + layout.min_extents * layout.extent_bytes,
            max_bytes=weights_bytes + layout.extents * layout.extent_bytes,
            memory_bytes=self._kept_LBW.nbytes,
            weights_bytes=weights_bytes,
            kv_bytes=kv_bytes,
            kept_bytes=self._kept_LBW.nbytes,
            standby_bytes=self._standby_bytes,
        )


@dataclass(slots=True)
class CompletedStep:
    """A step that is already done, since launching computes; or all but its sampling, until there are masks."""

    outcome: RunnerOutput | tuple[Tensor, StepBatch]

    def wait(self) -> RunnerOutput:
        assert isinstance(self.outcome, RunnerOutput), "masked rows without their masks"
        return self.outcome


class CpuRunner:
    """A decoder's StepExecutor and MaskedSampler on a CPU."""

    costs: CostModel | None = None

    def __init__(
        self, config: ModelConfig, memory: CpuMemory, limits: ExecutorLimits, beat: Callable[[], None]
    ) -> None:
        self.limits = limits
        self._config = config
        self._memory = memory
        self._rotary = rope_tables(config.rope, config.head_dim, limits.context_tokens)
        self._beat = beat

    def launch(self, packed: Int32s) -> InflightStep:
        batch = unpack_step(packed)
        check_step(batch, self.limits)
        assert batch.tokens_T.min() >= 0, "a token that is not known yet, though every step has landed"
        logits_RV = self.logits(batch)
        if logits_RV is None:
            return CompletedStep(RunnerOutput(np.empty(0, np.int32), {}))
        if batch.masked:
            return CompletedStep((logits_RV, batch))
        return CompletedStep(pooling_output(logits_RV) if self._config.vectors else sample_batch(logits_RV, batch))

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        assert isinstance(step, CompletedStep)
        assert isinstance(step.outcome, tuple), "a step without masked rows, or with its masks already"
        assert masks_MW.shape[1] == -(-self.limits.vocabulary // 32), "masks of another vocabulary"
        step.outcome = sample_batch(*step.outcome, masks_MW)

    def warm_up(self) -> bool:
        """Returns False: there is nothing to prepare."""
        return False

    def logits(self, batch: StepBatch) -> Tensor | None:
        """Runs a step. Returns float32 [R, V], or [R, H] where the model gives vectors; None without sampled rows."""
        decoder = self._memory.decoder
        assert decoder is not None, "asleep"
        step = CpuStep(batch, self._config, self._rotary, self._memory.pool)
        decoder.body(step, self._beat)
        return decoder.head(step) if len(batch.rows_R) else None
