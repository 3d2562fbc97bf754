"""The kernel in Gluon has no interpreter: here it is compiled for its GPU, which it needs none for, in a process that
does not interpret. What it computes is tested on a GPU, by the true shapes of test_attention.py."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from engine.kernels import attention_hopper
from engine.kernels.attention import WIDE
from engine.step.layout import GroupWord, group_word

SHARED_MOST = 232_448  # bytes of an H200's multiprocessor that one program may have
CONSTANTS: dict[str, Any] = {
    "HEADER_WORD": group_word(0, GroupWord.PLAN), "HEADS": 32, "KV_HEADS": 8, "G": 4, "D": 128, "KEYS": 128,
    "BLOCK_TOKENS": 16, "UNIT": 16, "WINDOWED": False, "CAPPED": False, "SINKS": False, "RING": 2, "sinks": None,
}  # fmt: skip
NARROW: dict[str, Any] = {"KEYS": 64, "RING": 3, "MERGED_G": 4}
NARROW_SHARED_MOST = SHARED_MOST // attention_hopper.NARROW_PROGRAMS  # they share a multiprocessor
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"WINDOWED": True, "BLOCK_TOKENS": 8, "UNIT": 8},
    "softcap": {"CAPPED": True, "G": 7, "HEADS": 56},
    "small heads, sinks": {"SINKS": True, "G": 8, "HEADS": 64, "D": 64, "BLOCK_TOKENS": 64},
    "narrow": NARROW,
    "narrow, windows, sinks": {**NARROW, "SINKS": True, "G": 8, "MERGED_G": 8, "HEADS": 64, "D": 64, "WINDOWED": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_to_warpgroup_matmuls_and_tensor_map_copies(name: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", __spec__.name, name], env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    constants = CONSTANTS | VARIANTS[name]
    narrow = "MERGED_G" in constants
    shared, matmuls, copies = map(int, re.findall(r"\d+", told))
    assert shared <= (NARROW_SHARED_MOST if narrow else SHARED_MOST)
    assert matmuls >= (1 if narrow else 4) * constants["D"] // 16
    assert copies == 2 * constants["KEYS"] // constants["UNIT"] * constants["D"] // 64


def test_entries_are_as_wide_as_it_takes_them() -> None:
    assert WIDE.rows == attention_hopper.ROWS


def compile_variant(name: str) -> str:
    constants = CONSTANTS | VARIANTS[name]
    if constants["SINKS"]:
        del constants["sinks"]  # a pointer, not None
    narrow = "MERGED_G" in constants
    kernel = attention_hopper._narrow if narrow else attention_hopper._wide
    box = f"bf16[{constants['UNIT']}, 64]"
    types = {
        "step": "*i32", "pool": f"tensordesc<{box},{gl.NVMMASharedLayout(128, 16, rank=2)!r}>", "q": "*bf16",
        "result": "*bf16", "partial": "*fp32", "peaks": "*fp32", "totals": "*fp32", "counters": "*i32",
        "scale": "fp32", "softcap": "fp32", "window": "i32", "sinks": "*fp32", **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if types[name].startswith("*")},
    )
    options = {"num_warps": 4, "maxnreg": attention_hopper._NARROW_REGISTERS if narrow else None}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = compiled.asm["ptx"]
    matmuls, copies = code.count("wgmma.mma_async"), code.count("cp.async.bulk.tensor.2d")
    return f"{compiled.metadata.shared} bytes shared, {matmuls} matmuls, {copies} copies"


if __name__ == "__main__":
    print(compile_variant(sys.argv[1]))
