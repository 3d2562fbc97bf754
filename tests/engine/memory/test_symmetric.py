"""engine/memory/symmetric.py and engine/ranks/channel.py: windows that processes share, and CUDA's calls for them where
they meet the driver."""

import os
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.memory.errors import OutOfDeviceMemory
from engine.memory.symmetric import CudaWindowDriver, HostWindowDriver, share_windows
from engine.ranks.channel import RankChannel, swap_as_follower, swap_as_leader
from tests.support.waiting import wait_for

SIZE = 10_000


def waiting(done: Any) -> None:
    wait_for(done)


def follow(rank: int, channel: RankChannel) -> None:
    windows_WB = share_windows(HostWindowDriver(), SIZE, rank, 3, swap_as_follower(channel, waiting))
    assert not windows_WB[rank].any()
    windows_WB[rank, 0] = windows_WB[0, rank] = 10 + rank
    wait_for(lambda: windows_WB[:, 0].tolist() == [10, 11, 12])


def test_each_rank_sees_what_the_others_write_into_their_windows_and_into_its_own() -> None:
    pairs, pids = [RankChannel.pair() for _ in range(2)], []
    for rank in (1, 2):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                follow(rank, pairs[rank - 1][1])
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    windows_WB = share_windows(HostWindowDriver(), SIZE, 0, 3, swap_as_leader([first for first, _ in pairs], waiting))
    assert windows_WB.shape[1] % os.sysconf("SC_PAGESIZE") == 0
    windows_WB[0, 0] = 10
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert windows_WB[:, :3].tolist() == [[10, 11, 12], [11, 0, 0], [12, 0, 0]]


def test_a_rank_that_ends_before_it_gave_its_window_is_no_rank() -> None:
    first, second = RankChannel.pair()
    del second
    with pytest.raises((ConnectionError, BrokenPipeError)):
        share_windows(HostWindowDriver(), SIZE, 0, 2, swap_as_leader([first], waiting))


def test_descriptors_are_closed_once_the_windows_are_mapped() -> None:
    before = len(os.listdir("/proc/self/fd"))
    windows_WB = share_windows(HostWindowDriver(), SIZE, 0, 1, lambda own: [os.dup(own)])
    assert windows_WB.shape[0] == 1
    assert len(os.listdir("/proc/self/fd")) == before


class FakeCuda:
    """The driver's calls for shared memory, as cuda.bindings has them, for two devices of one process."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        names = ("CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        self.CUresult = IntEnum("CUresult", names)
        self.CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
        self.access = self.CUresult.CUDA_SUCCESS

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == "cuMemSetAccess":
                return (self.access,)
            values = {"cuMemCreate": (77,), "cuMemExportToShareableHandle": (os.open(os.devnull, os.O_RDONLY),)}
            return (self.CUresult.CUDA_SUCCESS, *values.get(name, (78,) if "Import" in name else ()))

        return call


def cuda_driver(fake: FakeCuda) -> CudaWindowDriver:
    driver = CudaWindowDriver.__new__(CudaWindowDriver)
    driver._driver, driver._kind = fake, 1
    driver._properties, driver._access = SimpleNamespace(requestedHandleTypes=1), "own device"
    driver._context = "own context"
    return driver


def test_cuda_makes_memory_that_can_be_given_away_and_maps_what_it_got_for_its_own_device() -> None:
    fake = FakeCuda()
    driver = cuda_driver(fake)
    handle, descriptor = driver.make(1 << 21)
    driver.place(1 << 30, 1 << 21, handle)
    driver.place(2 << 30, 1 << 21, driver.open(descriptor))
    os.close(descriptor)
    assert [call[0] for call in fake.calls] == [
        "cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease",
        "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease",
    ]  # fmt: skip
    assert fake.calls[1][1:] == (77, 1, 0)
    assert fake.calls[6] == ("cuMemMap", 2 << 30, 1 << 21, 0, 78, 0)
    assert fake.calls[7] == ("cuMemSetAccess", 2 << 30, 1 << 21, ["own device"], 1)


def test_gpus_that_do_not_reach_each_other_are_told_by_the_drivers_word() -> None:
    fake = FakeCuda()
    fake.access = fake.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    with pytest.raises(RuntimeError, match="PEER_ACCESS_UNSUPPORTED"):
        cuda_driver(fake).place(1 << 30, 1 << 21, 5)
    assert fake.calls[-2:] == [("cuMemUnmap", 1 << 30, 1 << 21), ("cuMemRelease", 5)], "nothing of it is left"


def test_a_window_that_goes_is_unmapped_by_any_thread() -> None:
    fake = FakeCuda()
    driver = cuda_driver(fake)
    driver.attach()
    driver.displace(1 << 30, 1 << 21)
    driver.release(1 << 30, 1 << 21)
    assert fake.calls == [
        ("cuCtxSetCurrent", "own context"), ("cuMemUnmap", 1 << 30, 1 << 21), ("cuMemAddressFree", 1 << 30, 1 << 21),
    ]  # fmt: skip


def test_a_file_that_is_smaller_than_a_window_is_none() -> None:
    """Its pages past the end would end the process."""
    driver = HostWindowDriver()
    address, before = driver.reserve(1 << 16), len(os.listdir("/proc/self/fd"))
    handle = os.memfd_create("small")
    os.ftruncate(handle, 100)
    with pytest.raises(OutOfDeviceMemory, match="smaller"):
        driver.place(address, 1 << 16, handle)
    assert len(os.listdir("/proc/self/fd")) == before
    driver.release(address, 1 << 16)


def test_windows_are_tensors_of_the_own_device_over_the_memory_itself() -> None:
    """What the pointer is of is not asked: a window may be another GPU's."""
    driver, memory_B = cuda_driver(FakeCuda()), torch.zeros(32, dtype=torch.uint8)
    driver._device = memory_B.device
    window_B = driver.tensor(memory_B.data_ptr(), 32, None)
    window_B.view(torch.int64)[1] = 5
    assert memory_B[8] == 5
