"""Two replicas of one model, each on a GPU of its own that sees no other one, as an agent starts them; or two of the
built-in model on this CPU, with host memory in the place of the GPUs'."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.bench.geometries import write_folder
from engine.bench.vocabulary import write_tokenizer
from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from engine.protocol.specs import ModelSpec
from tests.support.moving_replicas import MovingReplica

PROGRAM = Path(__file__).with_name("timed_replica.py")
START_S = 400.0  # the first one may compile all its kernels


def model_spec(device: str, folder: Path) -> ModelSpec:
    if device == "cpu":
        return ModelSpec(
            name="ember", folder=str(files("engine") / "builtin_model"), dtype="float32", context_tokens=2048,
            kv_bytes=128 << 20, handover_bytes=128 << 20,
        )  # fmt: skip
    model = write_folder("llama-3.1-8b", folder / "llama-3.1-8b")
    write_tokenizer(model, 128256)
    return ModelSpec(
        name="llama-3.1-8b", folder=str(model), random_weights=True, context_tokens=16384, sequences=128,
        handover_bytes=16 << 30,
    )  # fmt: skip


@contextmanager
def two_replicas(device: str, kept: Path | None) -> Iterator[tuple[MovingReplica, MovingReplica]]:
    """Both serve; the second one finds the kernels that the first one compiled, and later ones those in `kept`."""
    with TemporaryDirectory() as scratch, _started(device, kept or Path(scratch), Path(scratch)) as pair:
        yield pair


@contextmanager
def _started(device: str, kept: Path, folder: Path) -> Iterator[tuple[MovingReplica, MovingReplica]]:
    spec, started = model_spec(device, kept), list[MovingReplica]()
    try:
        for number in range(2):
            here = folder / str(number)
            here.mkdir(parents=True, exist_ok=True)
            environment = {"CUDA_VISIBLE_DEVICES": str(number), KERNEL_CACHE_VARIABLE: str(kept / "kernels")}
            replica = MovingReplica(
                [sys.executable, str(PROGRAM)], here, spec, str(here / "marks"), device=device,
                environment=environment if device == "cuda" else None, start_s=START_S,
            )  # fmt: skip
            started.append(replica)
            try:
                _ = replica.peer
            except BaseException:
                print((here / "log").read_text()[-4000:], file=sys.stderr)
                raise
        yield started[0], started[1]
    finally:
        for replica in started:
            replica.stop()


def wait_until_idle(*replicas: MovingReplica) -> None:
    """Until nothing is held for handovers, and nothing runs."""
    for replica in replicas:
        peer = replica.peer
        peer.until(
            lambda peer=peer: peer.counted("handover_held") == 0 and peer.load.running == peer.load.waiting == 0, 20.0
        )
