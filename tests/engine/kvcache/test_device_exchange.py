"""engine/kvcache/device_exchange.py over host memory: what goes in comes out, what is let go is zeroed and unmapped,
and nothing that comes late reaches it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from engine.kernels import reference
from engine.kvcache.device_exchange import DeviceBlockExchange, DeviceWindow
from engine.kvcache.tensors import KVPool, KVShape
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.memory.streams import DeviceStream
from engine.memory.symmetric import HostWindowDriver
from engine.step.exchange import WindowClosed, WindowUnreachable
from tests.support.window_replica import Faults, windowed

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=8, block_tokens=16, dtype=torch.float32)
BLOCKS = 12


def pool() -> KVPool:
    made = KVPool(SHAPE, BLOCKS)
    for layer in range(SHAPE.layers):
        made.layers[layer][: BLOCKS * SHAPE.block_tokens].normal_()
    return made


def exchange(pool: KVPool, windows_bytes: int = 1 << 20) -> DeviceBlockExchange:
    return windowed(pool, Faults(windows_bytes=windows_bytes))


@pytest.fixture
def sides() -> Iterator[tuple[KVPool, DeviceBlockExchange, KVPool, DeviceBlockExchange]]:
    source, target = pool(), pool()
    out, into = exchange(source), exchange(target)
    yield source, out, target, into
    out.close()
    into.close()


def windows_of(out: DeviceBlockExchange, into: DeviceBlockExchange, blocks: int) -> tuple[DeviceWindow, DeviceWindow]:
    made = into.windows.make(blocks)
    assert made.descriptor is not None
    return made, out.windows.open(os.dup(made.descriptor), blocks)


def rows(pool: KVPool, blocks: list[int]) -> torch.Tensor:
    return pool.words_LNW[:, blocks].clone()


def mapped_and_open() -> tuple[int, int]:
    """How many windows this process maps, and how many files it has open."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("hearth-window" in line for line in lines), len(os.listdir("/proc/self/fd"))


def test_blocks_go_through_a_window_with_the_same_sums_on_both_sides(
    sides: tuple[KVPool, DeviceBlockExchange, KVPool, DeviceBlockExchange],
) -> None:
    source, out, target, into = sides
    made, opened = windows_of(out, into, 5)
    sums = opened.push(0, [7, 2]).wait() + opened.push(2, [0, 11, 5]).wait()
    assert made.checksums(0, 5) == sums
    assert len({*sums}) == 5
    assert all(0 <= each < 1 << 64 for each in sums)
    rest = rows(target, [0, 1, 2])
    made.pull(1, [8, 3, 4])
    assert torch.equal(rows(target, [8, 3, 4]), rows(source, [2, 0, 11]))
    assert torch.equal(rows(target, [0, 1, 2]), rest)
    opened.close()
    made.close()


def test_a_window_that_is_closed_is_zero_and_unmapped_and_takes_nothing_more(
    sides: tuple[KVPool, DeviceBlockExchange, KVPool, DeviceBlockExchange],
) -> None:
    _, out, _, into = sides
    before = mapped_and_open()
    made, opened = windows_of(out, into, 4)
    assert into.windows.held_bytes >= 4 * SHAPE.block_bytes
    opened.push(0, [1, 2, 3]).wait()
    made.close()
    made.close()
    assert opened.checksums(0, 4) == opened.checksums(0, 4)
    assert not any(opened._blocks_BLW.flatten().tolist()), "whoever still maps it finds nothing"  # type: ignore[union-attr]
    for late in (lambda: made.pull(0, [1]), lambda: made.checksums(0, 1), lambda: made.push(0, [1])):
        with pytest.raises(WindowClosed):
            late()
    opened.close()
    assert into.windows.held_bytes == out.windows.held_bytes == 0
    assert mapped_and_open() == before


def test_a_sender_that_closes_leaves_what_it_sent(
    sides: tuple[KVPool, DeviceBlockExchange, KVPool, DeviceBlockExchange],
) -> None:
    source, out, target, into = sides
    made, opened = windows_of(out, into, 1)
    opened.push(0, [9]).wait()
    opened.close()
    made.pull(0, [0])
    assert torch.equal(rows(target, [0]), rows(source, [9]))
    made.close()


def test_a_sender_that_gives_up_zeroes_what_the_receiver_may_have_let_go_before_it_came(
    sides: tuple[KVPool, DeviceBlockExchange, KVPool, DeviceBlockExchange],
) -> None:
    _, out, _, into = sides
    made, opened = windows_of(out, into, 2)
    descriptor = os.dup(made.descriptor or -1)
    made.close()
    opened.push(0, [3, 4]).wait()
    assert any(os.pread(descriptor, 2 * SHAPE.block_bytes, 0))
    opened.close(erase=True)
    assert not any(os.pread(descriptor, 2 * SHAPE.block_bytes, 0))
    os.close(descriptor)


def test_windows_end_where_their_limit_is_and_while_the_model_sleeps() -> None:
    awake, driver = [True], HostWindowDriver()
    stream = DeviceStream(torch.device("cpu"))
    limit = 4 * SHAPE.block_bytes // driver.granularity * driver.granularity
    own = DeviceBlockExchange(pool(), stream, reference, driver, limit, lambda: awake[0], lambda _: None)
    first = own.windows.make(2)
    with pytest.raises(OutOfDeviceMemory):
        own.windows.make(3)
    with pytest.raises(OutOfDeviceMemory):
        own.windows.make(1 << 50)
    first.close()
    second = own.windows.make(3)
    second.close()
    awake[0] = False
    with pytest.raises(OutOfDeviceMemory):
        own.windows.make(1)
    assert own.windows.held_bytes == 0
    own.close()


def test_memory_that_is_no_window_or_too_small_is_out_of_reach_and_costs_nothing() -> None:
    own, before = exchange(pool()), len(os.listdir("/proc/self/fd"))
    small = os.memfd_create("small")
    os.ftruncate(small, 100)
    for descriptor in (small, os.open(os.devnull, os.O_RDWR), os.pipe()[0]):
        with pytest.raises(WindowUnreachable):
            own.windows.open(descriptor, 3)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the pipe's other end
    own.close()


def test_where_there_is_no_place_for_a_window_its_memory_is_not_even_made(monkeypatch: pytest.MonkeyPatch) -> None:
    own, descriptor = exchange(pool()), os.memfd_create("window")
    os.ftruncate(descriptor, 1 << 20)
    before = len(os.listdir("/proc/self/fd"))

    def full(_: object, size: int) -> int:
        raise OutOfDeviceMemory(f"no {size} addresses are left")

    monkeypatch.setattr(HostWindowDriver, "reserve", full)
    with pytest.raises(OutOfDeviceMemory):
        own.windows.make(1)
    with pytest.raises(WindowUnreachable):
        own.windows.open(os.dup(descriptor), 1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert own.windows.held_bytes == 0
    own.close()
    os.close(descriptor)


def test_blocks_go_through_host_memory_as_well() -> None:
    source, target = pool(), pool()
    out, into = exchange(source), exchange(target)
    size = SHAPE.block_bytes
    memory = memoryview(bytearray(3 * size))
    gathering = out.gather([4, 0, 6], memory)
    thread = threading.Thread(target=lambda: gathering.wait())
    thread.start()
    thread.join()
    expected = torch.empty(3, SHAPE.layers, SHAPE.layer_block_bytes, dtype=torch.uint8)
    source.gather(torch.tensor([4, 0, 6]), expected)
    assert bytes(memory) == bytes(expected.flatten().tolist())
    into.scatter([1, 2, 3], memory)
    assert torch.equal(rows(target, [1, 2, 3]), rows(source, [4, 0, 6]))
    out.close()
    into.close()


@pytest.mark.parametrize(
    ("problem", "error"),
    [("CUDA error: out of memory", OutOfHostMemory), ("CUDA error: unspecified launch failure", RuntimeError)],
)
def test_host_memory_that_cannot_be_pinned_is_named(
    monkeypatch: pytest.MonkeyPatch, problem: str, error: type[Exception]
) -> None:
    out, memory = exchange(pool()), memoryview(bytearray(SHAPE.block_bytes))
    for name in ("empty", "zeros"):  # the memory of the blocks, and of their sums
        with monkeypatch.context() as patched:
            patched.setattr(torch, name, Mock(side_effect=RuntimeError(problem)))
            with pytest.raises(RuntimeError) as raised:
                out.gather([1], memory)
        assert raised.type is error
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", Mock(side_effect=RuntimeError(problem)))
        with pytest.raises(error):
            out.scatter([1], memory)
    out.gather([1], memory).wait()
    out.close()
