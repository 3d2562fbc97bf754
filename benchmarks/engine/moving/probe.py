"""Whether a process maps memory of a GPU that it does not see (CUDA_VISIBLE_DEVICES), and how fast it writes there,
beside one that it sees: two processes, each with one GPU of two. It serves nothing, and says what the driver says.

    python -m benchmarks.engine.moving.probe DEVICE SOCKET make|open    one of the two, as `probe` starts them
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import record
from engine.memory.symmetric import window_driver

BYTES = 1 << 30
ROUNDS = 10
ROOT = Path(__file__).parents[3]


def probe(device: str) -> None:
    """Records the rates of copies into the other GPU's memory. Raises CalledProcessError where a side failed; it has
    said why."""
    sights = {"a GPU that is not visible": ("0", "1"), "a GPU that is visible": ("0,1", "1,0")}
    if device != "cuda":
        sights = {"another process": ("0", "1")}
    rates = {where: _rate(device, visible) for where, visible in sights.items()}  # before recording asks for a GPU
    for where, rate in rates.items():
        record(
            "handovers", f"probe: copy of {BYTES >> 20} MiB into memory of {where}, median of {ROUNDS}", rate, "GB/s"
        )


def _rate(device: str, visible: tuple[str, str]) -> float:
    """GB/s between two processes that see these GPUs, their own one first."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine.moving.probe", device, str(end.fileno()), side], cwd=ROOT,
            pass_fds=[end.fileno()], env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, text=True,
        )
        for gpus, side, end in zip(visible, ("make", "open"), ends, strict=True)
    ]  # fmt: skip
    for end in ends:
        end.close()
    said = [process.communicate(timeout=120)[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return float(said[1].split()[-1])


def make(driver: Any, peer: socket.socket, size: int) -> None:
    window, descriptor = placed(driver, *driver.make(size))
    socket.send_fds(peer, [b"w"], [descriptor])
    assert peer.recv(1) == b"d", "the other side has ended"
    assert bool((window == 7).all()), "what the other side wrote is not here"


def open_there(driver: Any, peer: socket.socket, size: int) -> float:
    _, (descriptor, *_), _, _ = socket.recv_fds(peer, 1, 1)
    window, _ = placed(driver, driver.open(descriptor), descriptor)
    source, taken = torch.full_like(window, 7), []
    for _ in range(ROUNDS):
        driver.wait()
        began_s = time.monotonic()
        window.copy_(source)
        driver.wait()
        taken.append(time.monotonic() - began_s)
    peer.send(b"d")
    return size / sorted(taken)[ROUNDS // 2] / 1e9


def placed(driver: Any, handle: int, descriptor: int) -> tuple[torch.Tensor, int]:
    address = driver.reserve(BYTES)
    driver.place(address, BYTES, handle)
    return driver.tensor(address, BYTES, driver), descriptor


def main(argv: list[str]) -> None:
    device, end, side = argv
    driver = window_driver(torch.device("cuda:0" if device == "cuda" else device))
    with socket.socket(fileno=int(end)) as peer:
        print(make(driver, peer, BYTES) if side == "make" else open_there(driver, peer, BYTES))


if __name__ == "__main__":
    main(sys.argv[1:])
