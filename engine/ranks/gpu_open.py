"""Opens a decoder on several GPUs as rank 0. It knows neither what commands look like nor how a step is computed."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from engine.execution.device_select import select_device
from engine.execution.gpu_runner import GpuRunner
from engine.execution.memory_plan import DoesNotFit
from engine.execution.open import DecoderParts, loaded_decoder, read_decoder, seeing_source
from engine.execution.open_gpu import open_gpu
from engine.memory.errors import OutOfDeviceMemory
from engine.pipeline.pipeline_runner import PipelineRunner
from engine.protocol.specs import ModelSpec
from engine.ranks.fork import Ranks
from engine.ranks.gpu_executor import GpuAnnouncer, RankedGpuExecutor
from engine.ranks.gpu_lead import lead_exchange, lead_part
from engine.ranks.gpu_part import WaitEnder
from engine.ranks.group import RankWatch
from engine.ranks.leader import RankCommands, RankedMemory, ranked_model
from engine.step.executor import LoadedModel

_OPENING_STALL_S: Final = 300.0  # kernels are compiled


def open_on_gpus(
    model: ModelSpec, ranks: Ranks, beat: Callable[[], None], device_bytes: int | None, standby: bool
) -> LoadedModel:
    """Opens a model as rank 0 of several on GPUs, as `open_model` opens one of one rank. Raises RankLost beside what
    that raises."""
    group = ranks.group
    with ExitStack() as resources:
        resources.callback(group.close)
        config, tokens, files, source = read_decoder(model, select_device("cuda:0"))
        source = seeing_source(model, source)
        commands = RankCommands(group)
        announcer = GpuAnnouncer(commands)
        try:
            with group.patient(_OPENING_STALL_S):
                part = lead_part(model, source, ranks, commands, announcer, tokens)
                watch = RankWatch(group, WaitEnder(part.windows).end)
                resources.callback(watch.close)
                inner = resources.enter_context(ExitStack())
                runner, memory, report = open_gpu(
                    model, source.config, source, tokens, beat, device_bytes, standby, inner, part
                )
                assert isinstance(memory, RankedMemory)
                exchange = lead_exchange(memory, commands, inner)
                resources.callback(commands.close)
        except OutOfDeviceMemory as error:
            raise DoesNotFit(f"{model.name}: {error}") from error
        assert isinstance(runner, GpuRunner | PipelineRunner)
        parts: DecoderParts = (RankedGpuExecutor(runner, announcer, group), memory, report)
        return ranked_model(loaded_decoder(model, config, tokens, files, parts, resources), exchange, ranks.parts)
