"""One loaded model as a process: opens it, serves it, closes it.

python -m engine.replica.server '<ReplicaSpec JSON>'
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.hostinfo import gpus
from engine.log import log
from engine.process.allocator import keep_one_arena
from engine.process.files import fingerprint
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.process.supervised import die_with_parent
from engine.protocol.connection import listen, remove_socket
from engine.protocol.reports import WEIGHT_FILES, MemoryReport, memory_report_path
from engine.protocol.specs import ReplicaSpec
from engine.replica.replica import Replica, ReplicaLimits
from engine.step.executor import LoadedModel
from engine.structured_output.manager import StructuredOutputManager

ModelOpener = Callable[[ReplicaSpec, Callable[[], None]], LoadedModel]


class _EventHandler(logging.Handler):
    """Logs the records of other modules as events."""

    def emit(self, record: logging.LogRecord) -> None:
        log("note", logger=record.name, message=record.getMessage())


def run(spec: ReplicaSpec, open_model: ModelOpener, bounds: ReplicaLimits | None = None) -> int:
    """Loads the model, then serves until told to end or until the parent process is gone. Returns the exit status."""
    parent = os.getppid()
    die_with_parent(parent)()
    heartbeat = Heartbeat.create(spec.pulse)
    heartbeat.enter(ReplicaPhase.LOADING)
    began = time.monotonic()
    with contextlib.closing(StructuredOutputManager(Path(spec.model.folder), spec.threads)) as grammars:
        model = open_model(spec, heartbeat.beat)
        grammars.wait_ready()
        gc.collect()
        gc.freeze()  # what loading made stays: collections during steps need not walk it
        seconds = round(time.monotonic() - began, 3)
        log("loaded", model=spec.model.name, seconds=seconds, blocks=model.report.kv_blocks)
        try:
            status = serve(
                spec, model, grammars, heartbeat, bounds or ReplicaLimits(), orphaned=lambda: os.getppid() != parent
            )
        finally:
            heartbeat.enter(ReplicaPhase.STOPPING)
        if status == 0:  # a device that fails may not answer; the process's end gives back what it holds
            model.close()
        return status


def serve(
    spec: ReplicaSpec,
    model: LoadedModel,
    grammars: StructuredOutputManager,
    heartbeat: Heartbeat,
    bounds: ReplicaLimits,
    orphaned: Callable[[], bool],
) -> int:
    """Serves an open model on the spec's address. SIGTERM and SIGINT drain. Call it from the main thread."""
    listener = listen(spec.address)
    try:
        replica = Replica(spec, model, grammars, heartbeat, listener, bounds, orphaned, time.monotonic)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: replica.drain())
        log("serving", model=spec.model.name, address=spec.address)
        status = replica.run()
        log("ended", status=status)
        return status
    finally:
        listener.close()
        remove_socket(spec.address)


def _write_memory_report(pulse: str, report: MemoryReport) -> None:
    """Writes the report beside the heartbeat, at once or not at all; it is there while the process runs."""
    path = memory_report_path(pulse)
    unfinished = path.with_suffix(".new")
    try:
        unfinished.write_bytes(msgspec.json.encode(report))
        unfinished.replace(path)
    except OSError as error:
        log("memory_not_told", error=str(error))


def main(argv: list[str]) -> int:
    """Returns the exit status; a model that cannot be opened ends with 1, and with why as the last line on stderr."""
    if len(argv) != 1:
        print("usage: python -m engine.replica.server '<ReplicaSpec JSON>'", file=sys.stderr)
        return 2
    keep_one_arena()
    logging.basicConfig(level=logging.INFO, handlers=[_EventHandler()])
    spec = msgspec.json.decode(argv[0], type=ReplicaSpec)
    alone = spec.model.gpus * spec.model.stages == 1  # a driver that is awake would be of no use in forks
    if alone and spec.device != "cpu" and "torch" not in sys.modules and gpus.visible_gpus(os.environ):
        gpus.prewarm_driver()
    gc.disable()  # as in the zygote: collections are a fifth of what the imports take
    # Only here: tests serve models without torch.
    from engine.execution.open import UNSERVABLE, inference_mode, open_model
    from engine.ranks.fork import fork_ranks
    from engine.ranks.open import open_ranked_model

    gc.freeze()
    gc.enable()
    threads = None if spec.threads is None else max(1, spec.threads // (spec.model.gpus * spec.model.stages))
    ranks = fork_ranks(spec.model, spec.device, threads)  # now: threads would not be in the forks

    def open_reported(spec: ReplicaSpec, beat: Callable[[], None]) -> LoadedModel:
        folder = Path(spec.model.folder)
        weights = fingerprint(folder.glob(WEIGHT_FILES))
        if ranks is None:
            model = open_model(spec.model, spec.device, threads, beat, spec.device_bytes, spec.standby)
        else:
            model = open_ranked_model(spec.model, ranks, threads, beat, spec.device_bytes, spec.standby)
        _write_memory_report(spec.pulse, msgspec.structs.replace(model.report, folder=str(folder), weights=weights))
        return model

    with inference_mode():
        try:
            return run(spec, open_reported)
        except UNSERVABLE as error:  # its last line is what the machine tells of the model: no traceback is of use here
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
