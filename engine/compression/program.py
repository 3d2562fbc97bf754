"""What the programs over whole folders (compress, expand) share: where they compute, in which order, how they end on a
signal, and how they report errors. It does not know what they do.
"""

import argparse
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch

from engine.compression.target import TargetError
from engine.weights.tensor_index import CheckpointError

_FREE_BYTES: Final = 2 << 30  # what pieces may take of a GPU that others use as well
_THREADS_MAX: Final = {"cpu": 16, "cuda": 8}  # more would wait for the thread that writes
Item = TypeVar("Item")
Result = TypeVar("Result")


class ComputeDeviceError(ValueError):
    """The device does not exist."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N: where numbers are coded")
    parser.add_argument("--json", action="store_true", help="print JSON")


def device_for(name: str) -> torch.device:
    """The device of that name; `auto` is the first GPU if it has room. Raises ComputeDeviceError."""
    if name == "auto":
        room = torch.cuda.is_available() and torch.cuda.mem_get_info(0)[0] >= _FREE_BYTES
        return torch.device("cuda", 0) if room else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ComputeDeviceError(f"{name!r} is no device: auto, cpu, cuda or cuda:N is") from None
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        raise ComputeDeviceError(f"there is no device {name} here")
    return device


def threads_for(device: torch.device) -> int:
    """How many pieces are made at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _THREADS_MAX[device.type])


def map_ordered(
    pool: Executor, make: Callable[[Item], Result], items: Iterable[Item], prefetch: int
) -> Generator[Result]:
    """The results of `make` for each item, in order; `prefetch` of them are made ahead of the one that is taken."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > prefetch:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def print_json(report: msgspec.Struct) -> None:
    print(json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False))


def run_program(work: Callable[[], None]) -> int:
    """Runs `work` and returns the exit status: 0, 1 with the reason on stderr, or 128 and the number of the signal that
    ended it. Signals are raised in `work` as exceptions, so that it undoes what it began."""
    torch.set_num_threads(1)  # the threads that make pieces use the cores
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # `hearth models` held them back
        work()
    except _Terminated as ended:
        return _fail("stopped", 128 + ended.number)
    except (CheckpointError, TargetError, ComputeDeviceError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")
    except torch.cuda.OutOfMemoryError:
        return _fail("the GPU has no room beside what runs on it: use --device cpu")
    return 0


class _Terminated(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def _end(number: int, _: object) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)  # it ends once
    raise _Terminated(number)


def _fail(message: str, status: int = 1) -> int:
    print(f"hearth: {message}", file=sys.stderr)
    return status
