"""A replica on a CPU whose blocks go through windows as a GPU's do, with host memory in the place of the device's; and
what may go wrong with windows.

python tests/support/window_replica.py '<ReplicaSpec JSON>' ['<Faults JSON>']
"""

import sys
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.execution import open as opening
from engine.execution.kv_groups import CpuKVGroup
from engine.execution.open_cpu import block_exchange
from engine.kernels import reference
from engine.kvcache.device_exchange import DeviceBlockExchange
from engine.kvcache.tensors import KVPool
from engine.memory.streams import DeviceStream
from engine.memory.symmetric import HostWindowDriver
from engine.replica import server
from engine.step.executor import PagedMemory


class Faults(msgspec.Struct, frozen=True):
    """corrupt: so many gathers are written otherwise than they were summed up. `reaches`: what others make can be
    mapped. windows_bytes: room for windows."""

    corrupt: int = 0
    reaches: bool = True
    windows_bytes: int = 64 << 20


class FaultyCopies:
    """The reference's copies, the first of which may go wrong."""

    def __init__(self, corrupt: int) -> None:
        self.corrupt = corrupt
        self.scatter_blocks = reference.scatter_blocks
        self.sum_blocks = reference.sum_blocks

    def gather_blocks(self, words_LNW: Tensor, ids_B: Tensor, into_BLW: Tensor, sums_BL: Tensor) -> None:
        reference.gather_blocks(words_LNW, ids_B, into_BLW, sums_BL)
        if self.corrupt:
            self.corrupt -= 1
            into_BLW[len(into_BLW) // 2, 0, 3] ^= 1 << 9


class FaultyDriver(HostWindowDriver):
    def __init__(self, reaches: bool) -> None:
        super().__init__()
        self._reaches = reaches

    def open(self, descriptor: int) -> int:
        if not self._reaches:
            raise RuntimeError("this device does not reach that one")
        return super().open(descriptor)


def windowed(pool: KVPool, faults: Faults) -> DeviceBlockExchange:
    """Windows over a pool of a CPU."""
    stream = DeviceStream(torch.device("cpu"))
    copies, driver = FaultyCopies(faults.corrupt), FaultyDriver(faults.reaches)
    return DeviceBlockExchange(pool, stream, copies, driver, faults.windows_bytes, lambda: True, lambda _: None)


def main(argv: Items[str]) -> int:
    faults = msgspec.json.decode(argv[1], type=Faults) if argv[1:] else Faults()

    def exchange_of(memories: Items[PagedMemory]) -> Any:
        group = block_exchange(memories)
        return windowed(group.pool, faults) if isinstance(group, CpuKVGroup) else None

    vars(opening)["block_exchange"] = exchange_of
    return server.main([argv[0]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
