"""What a decoder does to few bfloat16 rows on a CPU: cpu_row.c, compiled by the host's C compiler where there is one,
together with cpu_tiles_amx.c or cpu_tiles_avx2.c, which multiplies any number of rows.

oneDNN multiplies one row at half the speed of memory, since it is made for many, and without AVX-512 it has no bfloat16
at all. With AVX-512 for bfloat16, `multiply_row` reads the weight as oneDNN packed it and adds up in the same order;
whoever uses it proves that first (layers/linear_cpu.py). Most others take the place of many small calls of torch, for
any number of rows. Without a compiler, or on a processor without AVX2, there are none. It knows no tensors.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

log = logging.getLogger(__name__)

INPUTS_MULTIPLE: Final = 32
OUTPUTS_MULTIPLE: Final = 64
CHUNKS: Final = (512, 1024, 2048, 4096)  # inputs that oneDNN sums up apart, by the size of its matmul
IN_TILES: Final = 0  # instead of such a number in a Matrix: it is packed for a matmul of our own

HEAD_MULTIPLE: Final = 32
_POINTER: Final = ctypes.c_void_p
_SIZE: Final = ctypes.c_long


class TileFunctions(NamedTuple):
    """The functions of cpu_tiles.h, which says what they take."""

    pack: Callable[..., None]
    multiply: Callable[..., None]


class RowFunctions(NamedTuple):
    """The functions of cpu_row.c, which says what they take: addresses, sizes, and threads at last. `multiply_row` is
    there with AVX-512 for bfloat16, `tiles` with AMX, or with neither."""

    add_norm: Callable[..., None]
    rotate_and_write: Callable[..., None]
    silu_and_multiply: Callable[..., None]
    read_blocks: Callable[..., None]
    before_attention: Callable[..., None]
    behind_attention: Callable[..., None]
    multiply_row: Callable[..., None] | None = None
    tiles: TileFunctions | None = None


class Matrix(ctypes.Structure):
    """`matrix` of cpu_row.c: a packed weight."""

    outputs: int
    _fields_: ClassVar = [("packed", _POINTER), ("inputs", _SIZE), ("outputs", _SIZE), ("chunk", _SIZE)]


class RowLayer(ctypes.Structure):
    """`row_layer` of cpu_row.c."""

    _fields_: ClassVar = [
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "qk_norm", "cache")),
    ]


class RowStep(ctypes.Structure):
    """`row_step` of cpu_row.c."""

    _fields_: ClassVar = [
        *((name, _SIZE) for name in ("hidden", "heads", "kv_heads", "size")),
        *((name, _POINTER) for name in ("sum", "added", "wide", "narrow")),
        *(("epsilon", ctypes.c_float), ("threads", ctypes.c_int)),
    ]


_SOURCES: Final = [str(Path(__file__).with_name(name)) for name in ("cpu_row.c", "cpu_tiles_amx.c", "cpu_tiles_avx2.c")]
_LIBRARY: Final = "cpu_row.so"
_PROCESSORS: Final = Path("/proc/cpuinfo")
_FEATURES: Final = frozenset(("avx2", "fma"))
_FLAGS: Final = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMPILING_S: Final = 300.0  # a second of a free core; who gives up is unlike its model's other replicas


class _Compilation(NamedTuple):
    process: "subprocess.Popen[bytes]"
    folder: Path


@cache
def start_compiling() -> _Compilation | None:
    """Starts the compiler, beside which much may be imported. None where it would be in vain."""
    if not _FEATURES.issubset(_processor_features()):
        return None
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("clang") or ""]
    if not compiler[0]:
        log.info("no C compiler: a row at a time takes up to twice as long, and with AVX2 alone there is no bfloat16")
        return None
    folder = Path(tempfile.mkdtemp(prefix="hearth-"))
    command = [*compiler, *_FLAGS, *_SOURCES, "-o", str(folder / _LIBRARY)]
    quiet = subprocess.DEVNULL
    try:
        return _Compilation(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet), folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        log.info("no C compiler for single rows: %s", error)
        return None


@cache
def row_functions() -> RowFunctions | None:
    """Returns the compiled functions. torch must be imported: both then share OpenMP's threads."""
    compilation = start_compiling()
    if compilation is None:
        return None
    try:
        compilation.process.wait(_COMPILING_S)
        library = ctypes.CDLL(str(compilation.folder / _LIBRARY))
    except (OSError, subprocess.TimeoutExpired) as error:
        compilation.process.kill()
        compilation.process.wait()
        log.info("the C compiler made nothing of %s, and oneDNN multiplies all that it can: %s", _SOURCES, error)
        return None
    finally:
        shutil.rmtree(compilation.folder, ignore_errors=True)
    pointer, size, count, number = _POINTER, _SIZE, ctypes.c_int, ctypes.c_float
    arguments: dict[str, list[Any]] = {
        "add_norm": [pointer, pointer, count, pointer, pointer, size, size, number, count],
        "rotate_and_write": [*[pointer] * 6, *[size] * 4, number, count],
        "silu_and_multiply": [pointer, pointer, size, size, count],
        "read_blocks": [pointer, pointer, size, size, pointer, pointer, size, size, count],
        "before_attention": [
            *(pointer, pointer, count, pointer, pointer, ctypes.c_int64, pointer, size, size, pointer, pointer, size),
            *(pointer, size),
        ],
        "behind_attention": [pointer, pointer, pointer, size, size],
        "multiply_row": [*[pointer] * 3, *[size] * 3, count],
    }
    functions = {name: library[f"hearth_{name}"] for name in arguments if hasattr(library, f"hearth_{name}")}
    for name, function in functions.items():
        function.argtypes, function.restype = arguments[name], None
    return RowFunctions(**functions, tiles=_tile_functions(library))


def _tile_functions(library: ctypes.CDLL) -> TileFunctions | None:
    """None where the processor has no tiles, or the system does not give them."""
    if not hasattr(library, "hearth_allow_tiles"):
        return None
    if library.hearth_allow_tiles() != 0:  # AVX2 needs no leave
        log.info("the system does not let this process use AMX: oneDNN multiplies bfloat16")
        return None
    pack, multiply = library.hearth_pack_tiles, library.hearth_multiply_tiles
    pack.argtypes, pack.restype = [*[_POINTER] * 2, *[_SIZE] * 2, ctypes.c_int], None
    multiply.argtypes, multiply.restype = [*[_POINTER] * 4, *[_SIZE] * 3, ctypes.c_int], None
    return TileFunctions(pack, multiply)


def _processor_features() -> list[str]:
    with suppress(OSError):
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("flags"):
                return line.split()
    return []
