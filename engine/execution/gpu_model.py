"""A decoder's parts on a GPU: its weights in memory that can go, the memory that its steps compute in, and who runs
them; of all of it, or of one of several ranks. What is measured, and what memory is left for, is not decided here."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.execution.artifacts import kernels_folder
from engine.execution.gpu_memory import GpuMemory, StepLimits, open_gpu_memory
from engine.execution.gpu_runner import GpuRunner
from engine.execution.gpu_trial import TrialRunner, TrialSteps
from engine.execution.gpu_vision import add_images, decoder_tensors, load_vision, reserve_weights
from engine.execution.memory_plan import DoesNotFit
from engine.kernels.compile_cache import share_kernel_cache
from engine.kernels.ranks.windows import RankWindows
from engine.memory.virtual_memory import Arena
from engine.models.config import ModelConfig
from engine.models.decoders import DecoderParameters
from engine.protocol.specs import ModelSpec
from engine.step.executor import DecoderExecutor, DecoderMemory
from engine.step.order import StepAnnouncer
from engine.weights.source import ShardSource, WeightSource


class RankPart(Protocol):
    """What one of several ranks loads and computes with (ranks/gpu_part.py).

    windows        that it shares with the others, as those of its stage exchange; announcer: rank 0's alone.
    arena_bytes    that it may map at most, the same on all ranks.
    sizes          of its pools, where all stages have the same; none where each rank finds them.
    kept_steps     how many steps' tokens it keeps beside those of the newest.
    """

    model: ModelSpec
    source: ShardSource | WeightSource
    windows: RankWindows
    announcer: StepAnnouncer | None
    arena_bytes: int

    @property
    def sizes(self) -> Sequence[tuple[int, int]]: ...

    @property
    def kept_steps(self) -> int: ...

    def launch_limits(self, limits: StepLimits, context_tokens: int) -> StepLimits:
        """The largest that is launched at once of steps of these limits."""
        ...

    def kv_room(self, room_bytes: int, free_bytes: int) -> tuple[int, int]:
        """How many bytes this rank may have for KV, and how many are free, if others are to map the same extents."""
        ...

    def pipeline(self, opened: "GpuModel", graph_rows: int) -> "DecoderRunner | None":
        """What runs steps on rank 0 where there are stages."""
        ...

    def load_parameters(self, beat: Callable[[], None], into: dict[str, Tensor]) -> DecoderParameters: ...

    def begin(self, memory: GpuMemory, segments: Sequence[int]) -> DecoderMemory:
        """Has the other ranks follow from now on, each with a workspace of so many segments. Returns the memory of
        all."""
        ...


class DecoderRunner(DecoderExecutor, TrialRunner, Protocol):
    """What runs a decoder's steps on GPUs, as those who open it see it."""

    @property
    def max_graphs(self) -> int: ...

    def capture_hot(self, beat: Callable[[], None]) -> None: ...

    def capture_first(self) -> None: ...

    def close(self) -> None: ...


class GpuModel:
    """A decoder's parts over weights that it loads: all of them, or those of one rank."""

    def __init__(
        self, model: ModelSpec, config: ModelConfig, source: WeightSource, context_tokens: int,
        beat: Callable[[], None], part: RankPart | None, resources: ExitStack,
    ) -> None:  # fmt: skip
        """`resources` closes weights and memory. Raises DoesNotFit or OutOfDeviceMemory."""
        device, own = source.device, source if part is None else part.source
        _require_weights_fit(device, own.bytes + source.vision_bytes)
        self.model, self.config = (model, config) if part is None else (part.model, own.config)
        self.context_tokens = context_tokens
        self._part = part
        arena = Arena.of(device, None if part is None else part.arena_bytes)
        weights = reserve_weights(arena, own, source)
        resources.callback(weights.close)
        with ThreadPoolExecutor(1) as beside:  # one thread waits for files and copies, while the other computes
            # On every rank: what one finds beside the model and another compiles would look as if that one hung.
            shared = beside.submit(share_kernel_cache, kernels_folder(Path(model.folder)))
            into = decoder_tensors(weights)
            self.parameters = source.load(beat, into) if part is None else part.load_parameters(beat, into)
            encoder = load_vision(source, weights, beat)
            shared.result()
        self.step_limits = StepLimits.of(
            model.sequences, model.step_tokens, context_tokens, model.block_tokens, len(config.kv_groups),
            0 if config.vision is None else config.vision.tokens,
        )  # fmt: skip
        self.launch_limits = self.step_limits if part is None else part.launch_limits(self.step_limits, context_tokens)
        self.memory = open_gpu_memory(
            self.model, self.config, source.dtype, weights, self.launch_limits, context_tokens, device,
            *(((), 0) if part is None else (part.sizes, part.kept_steps)),
            0 if encoder is None else self.launch_limits.rows,
        )  # fmt: skip
        resources.callback(self.memory.close)
        add_images(self.memory, config.vision, encoder)
        if part is not None:
            self.memory.windows = part.windows if part.windows.ranks > 1 else None
            self.memory.windows_bytes = part.windows.bytes
            self.memory.handover_bytes = 0  # blocks of ranks go through the host's memory

    def runner(self, graph_rows: int) -> GpuRunner:
        """What runs steps of which no part is another stage's."""
        announcer = None if self._part is None else self._part.announcer
        return GpuRunner(
            self.config, self.parameters, self.memory, self.step_limits, self.context_tokens, graph_rows, announcer
        )

    def decoder_runner(self, graph_rows: int) -> DecoderRunner:
        """What runs steps on rank 0."""
        runner = None if self._part is None else self._part.pipeline(self, graph_rows)
        return self.runner(graph_rows) if runner is None else runner

    def trial(self, runner: DecoderRunner) -> TrialSteps:
        config = self.config
        return TrialSteps(runner, self.step_limits.rows, self.model.block_tokens, config.vectors, config.windows)


def _require_weights_fit(device: torch.device, needed: int) -> None:
    """Raises DoesNotFit where the weights alone are more than what is free."""
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        fits = "other processes hold the rest: end them, or use" if needed <= total else "use"
        raise DoesNotFit(
            f"the weights take {needed / 1e9:.1f} GB, {free / 1e9:.1f} of {total / 1e9:.1f} GB are free; {fits} "
            f"another device or a smaller model"
        )
