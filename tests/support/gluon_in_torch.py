"""Runs a Gluon kernel for Hopper without a GPU: each of its partitions is a thread, each of its tensors one of torch's.

It knows no layouts of registers. It does know where tensor maps and matmuls put numbers in swizzled shared memory, that
copies may land at once and matmuls read as late as they are waited for, and which barriers are passed when. What reads
or writes beyond a tensor, or waits for what never comes, fails. It speaks as much of the language as our kernel does.
"""

import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

STUCK_S = 60.0
_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class Element:
    torch: torch.dtype
    primitive_bitwidth: int


INT32, INT64 = Element(torch.int32, 32), Element(torch.int64, 64)
BFLOAT16, FLOAT32 = Element(torch.bfloat16, 16), Element(torch.float32, 32)
_ELEMENTS = {element.torch: element for element in (INT32, INT64, BFLOAT16, FLOAT32)}


class Block(torch.Tensor):
    """A tensor of a kernel."""

    def to(self, element: Element, bitcast: bool = False) -> "Block":  # type: ignore[override]
        return block(self.view(element.torch) if bitcast else super().to(element.torch))

    def split(self) -> tuple["Block", "Block"]:  # type: ignore[override]
        return block(self[..., 0]), block(self[..., 1])


def block(tensor: torch.Tensor) -> Block:
    return tensor.as_subclass(Block)


@dataclass
class Pointer:
    memory: torch.Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=_ELEMENTS[self.memory.dtype])

    def places(self, mask: Any) -> torch.Tensor:
        """Where it points to, flat, for what the mask lets through; none lies outside of the memory."""
        offset = torch.as_tensor(self.offset)
        places = offset[torch.as_tensor(mask).expand(offset.shape)]
        assert ((places >= 0) & (places < self.memory.numel())).all(), "beyond a tensor"
        return places


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    offset = torch.as_tensor(pointer.offset)
    mask = torch.as_tensor(mask).expand(offset.shape)
    out = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    out[mask] = pointer.memory.view(-1)[pointer.places(mask)]
    return block(out) if offset.ndim else int(out)


def store(pointer: Pointer, value: torch.Tensor, mask: Any) -> None:
    pointer.memory.view(-1)[pointer.places(mask)] = value.as_subclass(torch.Tensor)[mask]


class Stuck(Exception):
    """A partition waits for what nobody does."""


class Program:
    """One program's partitions, which stop together."""

    condition = threading.Condition()
    failed: list[BaseException] = []  # noqa: RUF012
    identity, count = 0, 1


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there that were expected."""

    def __init__(self) -> None:
        self.phase = self.arrived = self.count = self.bytes = 0

    def change(self, arrived: int, count: int) -> None:
        with Program.condition:
            self.arrived += arrived
            self.bytes += count
            assert self.arrived <= self.count, "more arrive than a phase has"
            if self.arrived == self.count and self.bytes == 0:
                self.phase, self.arrived = self.phase ^ 1, 0
            Program.condition.notify_all()

    def wait(self, phase: int) -> None:
        with Program.condition:
            if not Program.condition.wait_for(lambda: self.phase != phase or Program.failed, STUCK_S):
                raise Stuck
            if Program.failed:
                raise Stuck


@dataclass(frozen=True)
class Swizzled:
    """NVMMASharedLayout: panels of so many bytes of each row, their 16-byte chunks exchanged by rows."""

    width: int
    bits: int
    rank: int = 2

    def places(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] → elements from the beginning."""
        itemsize = self.bits // 8
        row, byte = torch.arange(rows)[:, None], torch.arange(columns)[None, :] * itemsize
        at = byte // self.width * rows * self.width + row * self.width + byte % self.width
        return (at ^ (at >> 7 & self.width // 16 - 1) << 4) // itemsize


@dataclass(frozen=True)
class Linear:
    """SharedLinearLayout: each bit of an element's position is a change of its coordinates."""

    bases: list[list[int]]
    blocks: list[list[int]]
    alignment: int

    def places(self, rows: int, columns: int) -> torch.Tensor:
        at = torch.arange(1 << len(self.bases))
        row, column = torch.zeros_like(at), torch.zeros_like(at)
        for bit, (r, c) in enumerate(self.bases):
            row, column = row ^ (at >> bit & 1) * r, column ^ (at >> bit & 1) * c
        places = torch.full((rows, columns), -1)
        places[row, column] = at
        assert (places >= 0).all(), "no layout of these"
        return places


@dataclass(frozen=True)
class Flat:
    vec: int
    per_phase: int
    max_phase: int
    order: list[int]


@dataclass
class Shared:
    """Shared memory as a kernel sees it: of an allocation's `memory` a tile, whose elements are at `places`."""

    memory: torch.Tensor
    shape: list[int]
    layout: Any
    places: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.places is None:
            if len(self.shape) == 2 and not isinstance(self.layout, Flat):
                self.places = self.layout.places(*self.shape)
            else:
                self.places = torch.arange(self.memory.numel()).view(self.shape)

    def index(self, nth: int) -> "Shared":
        size = self.memory.numel() // self.shape[0]
        part = self.memory[nth * size : (nth + 1) * size]
        assert part.numel() == size, "beyond shared memory"
        return Shared(part, self.shape[1:], self.layout)

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        assert self.places is not None
        places = self.places.narrow(dim, start, length)
        return Shared(self.memory, list(places.shape), self.layout, places)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        assert self.places is not None
        return Shared(self.memory, [self.shape[at] for at in order], self.layout, self.places.permute(order))

    def reinterpret(self, element: Element, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.memory.view(element.torch), shape, layout)

    def load(self, layout: Any) -> Block:
        assert self.places is not None
        return block(self.memory[self.places])

    def store(self, value: torch.Tensor) -> None:
        assert self.places is not None
        self.memory[self.places] = value.as_subclass(torch.Tensor).to(self.memory.dtype)


@dataclass(frozen=True)
class TensorMap:
    tensor: torch.Tensor
    shape: list[int]
    strides: list[int]
    box: list[int]
    layout: Swizzled

    def __post_init__(self) -> None:
        assert self.layout.width == self.box[1] * self.tensor.itemsize
        assert self.strides == [self.shape[1], 1]
        assert self.strides[0] * self.tensor.itemsize % 16 == 0


def copy(source: TensorMap, at: list[int], barrier: Barrier, to: Shared) -> None:
    """What lies outside of the tensor is zero."""
    (row, column), (rows, columns) = at, source.box
    assert to.shape == source.box
    tile = torch.zeros(rows, columns, dtype=source.tensor.dtype)
    inside = source.tensor[row : row + rows, column : column + columns]
    tile[: inside.shape[0], : inside.shape[1]] = inside
    to.store(tile)
    barrier.change(0, -rows * columns * source.tensor.itemsize)


@dataclass
class Sum:
    """A matmul's sums: what has been added, and what is under way."""

    value: torch.Tensor
    pending: list[tuple[torch.Tensor, Shared]] = field(default_factory=list)


def multiply(a: Block, b: Shared, total: Any, is_async: bool) -> Sum:
    assert is_async
    before = total if isinstance(total, Sum) else Sum(total)
    return Sum(before.value, [*before.pending, (a, b)])


def wait(outstanding: int, deps: list[Any]) -> tuple[Any, ...]:
    total = deps[0]
    done, pending = total.pending[: len(total.pending) - outstanding], total.pending[-outstanding:]
    value = total.value
    for a, b in done:
        value = value + a.float() @ b.load(None).float()
    return (Sum(value, pending) if outstanding else block(value), *deps[1:])


def assembly(text: str, constraints: str, args: list[Any], elements: Any, pure: bool, pack: int) -> list[Block]:
    """Each argument has `pack` registers, beside each other in the last dimension."""
    shape = torch.broadcast_shapes(*(arg.shape for arg in args))
    inputs = [arg.as_subclass(torch.Tensor).long().expand(shape).reshape(-1, pack) & _BITS for arg in args]
    registers = {f"${len(elements) + nth}": values for nth, values in enumerate(torch.cat(inputs, 1).T)}

    def read(name: str) -> Any:
        return registers[name] if name in registers else int(name, 0)

    for operation, operands in re.findall(r"([a-z]+(?:\.[a-z0-9]+)+) ([^;{}]+);", text):
        if operation.startswith("reg."):
            continue
        to, *names = [name.strip() for name in operands.split(",")]
        a, *others = map(read, names)
        if operation == "mov.b32":
            result = a
        elif operation == "and.b32":
            result = a & others[0]
        elif operation == "mad.lo.u32":
            result = a * others[0] + others[1] & _BITS
        elif operation == "shf.l.wrap.b32":  # $c:b turned left, of which the high half
            result = (others[0] << others[1] | a >> 32 - others[1]) & _BITS
        else:
            assert operation == "prmt.b32"
            both = a | others[0] << 32  # the highest byte's sign bit is lost, but comes back by the mask
            result = sum((both >> 8 * (others[1] >> 4 * byte & 7) & 0xFF) << 8 * byte for byte in range(4))
        registers[to] = result
    halves = [
        torch.stack((registers[f"${nth}"] & 0xFFFF, registers[f"${nth}"] >> 16), 1) for nth in range(len(elements))
    ]
    return [block(half.to(torch.uint16).view(torch.bfloat16).reshape(shape)) for half in halves]


def specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    def run(partition: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            partition(*args)
        except BaseException as error:
            with Program.condition:
                Program.failed.append(error)
                Program.condition.notify_all()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if Program.failed:
        failed, Program.failed = Program.failed, []
        raise failed[0]


@dataclass
class Kernel:
    """A function of the language."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **constants: Any) -> Any:
        return self.function(*args, **constants)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
            pointers = [Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            for Program.identity in range(grid[0]):
                Program.count = grid[0]
                self.function(*pointers, **constants)

        return launch


class Constant(int):
    @property
    def value(self) -> int:
        return int(self)


def allocate(element: Element, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=barriers.__getitem__)
    size = torch.Size(shape).numel()
    return Shared(torch.full((size,), 77, dtype=element.torch), shape, layout)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _jit(function: Any = None, **_: Any) -> Any:
    return Kernel(function) if function else Kernel


_MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: "barriers", init=lambda barrier, count: setattr(barrier, "count", count),
    expect=lambda barrier, count: barrier.change(1, count), arrive=lambda barrier: barrier.change(1, 0),
    wait=lambda barrier, phase: barrier.wait(phase),
)  # fmt: skip
_LANGUAGE = SimpleNamespace(
    constexpr=Constant, int32=INT32, int64=INT64, bfloat16=BFLOAT16, float32=FLOAT32, load=load, store=store,
    program_id=lambda _: Program.identity, num_programs=lambda _: Program.count, static_range=range, minimum=min,
    arange=lambda first, end, _: block(torch.arange(first, end)),
    zeros=lambda shape, element, _: block(torch.zeros(shape, dtype=element.torch)), exp=torch.exp, where=torch.where,
    join=lambda left, right: torch.stack((left, right), -1), convert_layout=lambda value, _: value,
    inline_asm_elementwise=assembly, allocate_shared_memory=allocate, warp_specialize=specialize,
    shared_memory_descriptor=Shared, NVMMASharedLayout=Swizzled, SharedLinearLayout=Linear, SwizzledSharedLayout=Flat,
    **dict.fromkeys(("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"), _nothing),
    DistributedLinearLayout=_nothing,
)  # fmt: skip
_GLUON = SimpleNamespace(jit=_jit, constexpr_function=lambda function: function, language=_LANGUAGE)
_HOPPER = SimpleNamespace(
    fence_async_shared=_nothing, mbarrier=_MBARRIER, tma=SimpleNamespace(async_load=copy), warpgroup_mma=multiply,
    warpgroup_mma_wait=wait,
)  # fmt: skip
_MODULES = {
    "triton.experimental": SimpleNamespace(gluon=_GLUON),
    "triton.experimental.gluon": _GLUON,
    "triton.experimental.gluon.language.nvidia.hopper": _HOPPER,
    "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=TensorMap),
    "triton.language": SimpleNamespace(debug_barrier=_nothing),
    "triton.language.extra.cuda": SimpleNamespace(gdc_launch_dependents=_nothing, gdc_wait=_nothing),
}


@contextmanager
def in_torch(*modules: ModuleType) -> Iterator[Any]:
    """The last of the modules again, its kernels in torch. Earlier ones are those of its imports that hold kernels."""
    with mock.patch.dict(sys.modules, _MODULES):
        for module in modules:
            assert module.__file__ is not None
            spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module.__name__] = again = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(again)
    yield again
