"""Prepares what starts of a model take over: opens it as a replica would, on all its ranks, and ends. It serves no
requests.

    python -m engine.replica.warmup '<ModelSpec JSON>' DEVICE [look]

With `look` nothing is opened. A line of JSON on stdout says what is kept; what went wrong is the last one on stderr,
with exit status 1.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Final

import msgspec

from engine.execution.artifacts import ArtifactFiles, CpuArtifact, GpuArtifact, gpu_artifacts
from engine.execution.device_select import device_facts, select_device
from engine.execution.open import inference_mode, model_artifacts, open_model, read_decoder
from engine.log import log
from engine.pipeline.stage_plan import stage_shares
from engine.protocol.reports import WarmupReport
from engine.protocol.specs import ModelSpec
from engine.ranks.fork import Ranks, fork_ranks
from engine.ranks.open import open_ranked_model
from engine.step.executor import LoadedModel

_BEAT_S: Final = 1.0


def warm_up(model: ModelSpec, device: str, opening: bool, ranks: Ranks | None = None) -> WarmupReport:
    """Opens the model, on the `ranks` that were forked for it, or only looks for what a start takes over. Raises as
    open_model."""
    began = time.monotonic()
    artifacts = _artifacts(model, device)
    if artifacts is None:
        return WarmupReport(needed=False, found=False, seconds=0.0)
    found = artifacts.read() is not None
    if opening:
        with closing(_open(model, device, ranks)) as opened:
            while opened.executor.warm_up():
                pass
        artifacts.spread()  # what another model of the same sizes has left is to lie beside this one, too
    files = [str(file) for file in artifacts.files if file.exists()] if found or opening else []
    return WarmupReport(needed=True, found=found, seconds=time.monotonic() - began, files=files)


def _artifacts(model: ModelSpec, device: str) -> ArtifactFiles[CpuArtifact] | ArtifactFiles[GpuArtifact] | None:
    """What starts of the model take over, on several GPUs what rank 0 does. Raises as open_model."""
    where = select_device(device)
    if model.gpus * model.stages == 1 or where.type == "cpu":
        return model_artifacts(model, device)
    _, tokens, _, source = read_decoder(model, where)
    share, (name, *_) = stage_shares(model, source)[0], device_facts(where)
    return gpu_artifacts(share.model, share.source.config, tokens, str(source.dtype), source.bf12_parameters, name)


def _open(model: ModelSpec, device: str, ranks: Ranks | None) -> LoadedModel:
    if ranks is None:
        return open_model(model, device, None, _beats())
    return open_ranked_model(model, ranks, None, _beats())


def _beats() -> Callable[[], None]:
    """Returns a beat that logs now and then that the start goes on."""
    logged_at = time.monotonic()

    def beat() -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at >= _BEAT_S:
            logged_at = time.monotonic()
            log("preparing")

    return beat


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model, opening = msgspec.json.decode(argv[0], type=ModelSpec), argv[2:] != ["look"]
    try:
        ranks = fork_ranks(model, argv[1], None) if opening else None  # now: threads would not be in the forks
        with ExitStack() as resources, inference_mode():
            if ranks is not None:
                resources.callback(ranks.group.close)
            warmed = warm_up(model, argv[1], opening, ranks)
    except (ValueError, RuntimeError, OSError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    print(msgspec.json.encode(warmed).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
