"""Windows between two GPUs of this machine, each seen by one process alone, as an agent starts replicas."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.ranks import block_copies
from engine.kvcache.device_exchange import DeviceBlockExchange
from engine.kvcache.tensors import KVPool, KVShape
from engine.memory.streams import DeviceStream
from engine.memory.symmetric import window_driver
from engine.memory.virtual_memory import Arena

ROOT = Path(__file__).parents[3]
SHAPE = KVShape(layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype=torch.bfloat16)
BLOCKS = 256
IDS = [7, 3, 250, *range(20, 120)]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def exchange() -> tuple[KVPool, DeviceBlockExchange]:
    """On the only GPU that this process sees; block b of layer l is full of b + l · BLOCKS."""
    device = torch.device("cuda:0")
    pool = KVPool(SHAPE, BLOCKS, Arena.of(device))
    numbers = torch.arange(SHAPE.layers * BLOCKS, device=device).view(SHAPE.layers, BLOCKS, 1)
    pool.words_LNW[:, :BLOCKS] = numbers
    stream = DeviceStream(device)
    torch.cuda.synchronize()
    made = DeviceBlockExchange(pool, stream, block_copies, window_driver(device), 1 << 30, lambda: True, lambda _: None)
    made.compile()
    return pool, made


def take_in(peer: socket.socket) -> dict[str, object]:
    pool, own = exchange()
    free = torch.cuda.mem_get_info()[0]
    window = own.windows.make(len(IDS))
    assert window.descriptor is not None
    socket.send_fds(peer, [b"w"], [window.descriptor])
    sums = json.loads(peer.recv(1 << 16))
    compared = window.checksums(0, len(IDS)) == sums
    pool.words_LNW[:, :BLOCKS].zero_()
    window.pull(0, list(range(len(IDS))))
    torch.cuda.synchronize()
    came = torch.tensor(IDS, device="cuda:0") + BLOCKS * torch.arange(SHAPE.layers, device="cuda:0")[:, None]
    right = bool((pool.words_LNW[:, : len(IDS)] == came[..., None]).all())
    window.close()
    peer.send(b"d")
    assert peer.recv(1) == b"d"  # it has unmapped it too
    return {"compared": compared, "right": right, "lost_bytes": free - torch.cuda.mem_get_info()[0]}


def push(peer: socket.socket) -> dict[str, object]:
    _, own = exchange()
    _, (descriptor, *_), _, _ = socket.recv_fds(peer, 1, 1)
    window = own.windows.open(descriptor, len(IDS))
    first = window.push(0, IDS[:3])
    second = window.push(3, IDS[3:])
    peer.sendall(json.dumps(first.wait() + second.wait()).encode())
    assert peer.recv(1) == b"d"
    window.close()
    peer.send(b"d")
    return {"took_us": second.took_us}


def main(side: str, end: str) -> None:
    with torch.inference_mode(), socket.socket(fileno=int(end)) as peer:
        print(json.dumps((take_in if side == "take_in" else push)(peer)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("numbers", [(0, 0), pytest.param((0, 1), marks=two_gpus)], ids=["one GPU", "two GPUs"])
def test_blocks_go_to_a_gpu_that_the_sender_does_not_see(numbers: tuple[int, int]) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, side, str(end.fileno())], cwd=ROOT, pass_fds=[end.fileno()],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number), "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        )
        for side, end, number in zip(("take_in", "push"), ends, numbers, strict=True)
    ]  # fmt: skip
    for end in ends:
        end.close()
    taken, pushed = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert taken["compared"]
    assert taken["right"]
    assert taken["lost_bytes"] <= 64 << 20, "the window's memory is the device's again"
    assert pushed["took_us"] > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
