"""engine/weights/device_buffer.py: weights go and come back bit by bit, and each stage has its mark."""

from unittest.mock import patch

import pytest
import torch

from engine.memory.errors import OutOfDeviceMemory
from engine.memory.pinned import PIECE_BYTES
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.virtual_memory import Arena, HostMemoryDriver
from engine.weights.device_buffer import TensorShapes, WeightBuffer

CPU = torch.device("cpu")
SHAPES: TensorShapes = {
    "embedding": (torch.Size((3000, 4001)), torch.bfloat16),  # 24 MB
    "layers.0.norm": (torch.Size((7,)), torch.float32),
    "layers.0.qkv.weight": (torch.Size((4000, 5000)), torch.bfloat16),  # 40 MB
    "layers.1.norm": (torch.Size((7,)), torch.float32),
    "norm": (torch.Size((5,)), torch.float32),
    "head.weight": (torch.Size((30, 40)), torch.bfloat16),
}


def made() -> tuple[WeightBuffer, dict[str, torch.Tensor]]:
    weights = WeightBuffer(Arena.of(CPU), SHAPES)
    generator = torch.Generator().manual_seed(5)
    for tensor in weights.tensors.values():
        tensor.normal_(generator=generator)
    return weights, {name: tensor.clone() for name, tensor in weights.tensors.items()}


def test_tensors_have_their_shapes_and_lie_aligned_one_behind_the_other() -> None:
    weights, _ = made()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in weights.tensors.items()} == SHAPES
    addresses = [tensor.data_ptr() for tensor in weights.tensors.values()]
    assert addresses == sorted(addresses)
    assert all(address % 256 == 0 for address in addresses)


def test_they_go_and_come_back_bit_by_bit() -> None:
    weights, before = made()
    copies, queued = DeviceStream(CPU), []
    while count := weights.prepare(copies):
        queued.append(count)
    assert sum(queued) == weights.bytes
    assert len(queued) == -(-weights.bytes // PIECE_BYTES) == 3 - 1
    for _ in range(2):
        weights.unmap()
        assert weights.arena.mapped_bytes == 0
        assert not any(tensor.any() for tensor in weights.tensors.values())
        weights.map()
        assert len(weights.send(copies)) == 5
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights.tensors.items())
        assert weights.prepare(copies) == 0


def test_weights_without_a_copy_are_not_given_back() -> None:
    weights, _ = made()
    weights.prepare(DeviceStream(CPU))
    with pytest.raises(AssertionError, match="no copy"):
        weights.unmap()


def test_a_stages_mark_comes_behind_its_last_byte() -> None:
    weights, before = made()
    copies = DeviceStream(CPU)
    while weights.prepare(copies):
        pass
    weights.unmap()
    weights.map()
    there: list[list[str]] = []

    def record(mark: StreamEvent) -> None:
        there.append([name for name, tensor in weights.tensors.items() if torch.equal(tensor, before[name])])

    with patch.object(StreamEvent, "set", record):
        weights.send(copies)
    for stage, names in zip(("embedding", "layers.0", "layers.1", "norm", "head"), there, strict=True):
        assert {name for name in SHAPES if name.startswith(stage)} <= set(names)
    assert "layers.0.qkv.weight" not in there[0], "the first mark waits for all"


def test_too_little_memory_for_them_is_said() -> None:
    with pytest.raises(OutOfDeviceMemory, match="weights"):
        WeightBuffer(Arena(HostMemoryDriver(), 1 << 20), SHAPES)
