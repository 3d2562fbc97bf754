"""The kernels of engine/kernels/experts compiled for Hopper, which needs no GPU, in a process that does not interpret:
as decodes and prompts of the models that are served launch them, they fit, and go on tensor cores."""

import os
import re
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import linear
from engine.kernels.experts import (
    absent_experts,
    grouped_bf12,
    grouped_linear,
    grouped_mxfp4,
    quantize_rows,
    route,
    row_experts,
)  # fmt: skip
from engine.kernels.experts.grouped_tuning import bf12_tiling_for, mxfp4_tiling_for, tile_rows, tiling_for
from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from engine.kernels.fp8 import tiles
from engine.kernels.fp8.tiles import Fp8Tiling
from engine.kernels.fp8.tuning import rule_tiling

SHARED_MOST = 232_448  # bytes of an H200's multiprocessor that one program may have
# hidden size, an expert's on one rank, its rule
MODELS: dict[str, tuple[int, int, RoutingRule]] = {
    "scout": (5120, 4096, RoutingRule(16, 1, RouterScores.SIGMOID, scales_inputs=True)),
    "qwen3": (2048, 768, RoutingRule(128, 8, normed=True)),
    "gpt-oss": (2880, 2880, RoutingRule(32, 4, RouterScores.SOFTMAX_OF_CHOSEN)),
}
ROWS = (1, 256, 8192)
FP8 = "*fp8e4nv"
POINTERS = {
    "logits": "*fp32", "x": "*bf16", "w": "*bf16", "bias": "*bf16", "out": "*bf16", "added": "*fp32",
    "words": "*i32", "scales": "*fp32", "values": "*bf16", "weights": "*fp32", "x_scales": "*fp32", "w_scales": "*fp32",
    **dict.fromkeys(("count", "ids", "counts", "ends", "order", "tiles", "firsts", "places", "absent"), "*i32"),
}  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], warps: int, stages: int | None = None, **pointers: str) -> Any:
    types = POINTERS | {"limit": "fp32", **pointers} | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    even = [name for name in names if signature[name].startswith("*") or (name in "NKW" and signature[name] == "i32")]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )  # fmt: skip
    options = {"num_warps": warps} | ({} if stages is None else {"num_stages": stages})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def grouped(model: str, rows: int, gated: bool, **changes: Any) -> Any:
    hidden, inner, rule = MODELS[model]
    entries, (outputs, inputs) = rows * rule.chosen, (inner, hidden) if gated else (hidden, inner)
    tile = tile_rows(entries, rule.experts)
    tiling = tiling_for(outputs, inputs, entries, rule.experts, tile, gated, changes.get("BLOCKS", 1))
    constants = {
        "C": rule.chosen, "BLOCKS": 0, "GATED": gated, "LIMITED": model == "gpt-oss" and gated,
        "BIASED": model == "gpt-oss", "SCALES": 0,
        "WEIGH_INPUTS": gated and rule.scales_inputs, "WEIGH_OUTPUTS": not gated and not rule.scales_inputs,
        "MASKED": bool(inputs % tiling.block_k), "ONCE": tile <= 32, "BLOCK_T": tile, "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k, "STAGES": tiling.stages, "ALONE": False,
    }  # fmt: skip
    pointers = {name: changes.pop(name) for name in list(changes) if name.islower()}
    return compiled(grouped_linear._multiply, constants | changes, tiling.warps, **pointers)


def in_fp8(rows: int, gated: bool, blocks: int, alone: bool) -> Any:
    """Qwen 3's experts, or a dense layer of its sizes, in 8 bits."""
    changes = {"SCALES": 1 if blocks == 1 else 2, "BLOCKS": blocks}
    if alone:
        changes |= {"ALONE": True, "C": 1, "BLOCK_T": tile_rows(rows, 1), "WEIGH_OUTPUTS": False}
    return grouped("qwen3", rows, gated, **changes, w=FP8, x=FP8)


def dense_in_fp8(rows: int, gated: bool, packs: bool = False) -> Any:
    """Llama-3.1-8B's gate above up, or its qkv, in 8 bits, for few rows, or one that the kernel packs."""
    tiling = rule_tiling(28672 if gated else 6144, 4096, rows, gated)
    constants = {
        "GATED": gated, "MASKED": False, "SCALED": True, "PACKS": packs, "WIDTH": 4096,
        "BLOCK_T": max(16, triton.next_power_of_2(rows)),
        "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "STAGES": tiling.stages,
    }  # fmt: skip
    return compiled(linear._multiply_rows, constants, tiling.warps, w=FP8, x="*bf16" if packs else FP8)


def tiled_in_fp8(tiling: Fp8Tiling) -> Any:
    constants = {"EXACT": tiling.exact, "BLOCK_T": tiling.block_t, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k}
    x, w = (f"tensordesc<fp8e4nv[{rows}, {tiling.block_k}]>" for rows in (tiling.block_t, tiling.block_n))
    out = "*fp32" if tiling.parts > 1 else "*bf16"
    return compiled(tiles._multiply_tiles, constants, tiling.warps, tiling.stages, x=x, w=w, out=out)


def one_row(model: str, gated: bool) -> Any:
    """An expert chosen and gated, or multiplied, for one row."""
    hidden, inner, rule = MODELS[model]
    tiling, inputs = (row_experts.GATED_ROW, hidden) if gated else (row_experts.ROW, inner)
    constants = {
        "BIASED": model == "gpt-oss", "WEIGH": gated == rule.scales_inputs, "MASKED": bool(inputs % tiling.block_k),
        "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "STAGES": tiling.stages,
    }  # fmt: skip
    if not gated:
        return compiled(row_experts._multiply_row, constants, tiling.warps, out="*fp32")
    constants |= {
        "P": 4, "E": rule.experts, "EP": triton.next_power_of_2(rule.experts), "C": rule.chosen,
        "KIND": route._KIND[rule.scores], "NORMED": rule.normed, "SCALE": 1.0, "CHOICE_BIASED": False,
        "LIMITED": model == "gpt-oss",
    }  # fmt: skip
    return compiled(row_experts._gate_row, constants, tiling.warps, choice_bias="*fp32")


def coded(model: str, rows: int, gated: bool) -> Any:
    hidden, inner, rule = MODELS[model]
    entries, (outputs, inputs) = rows * rule.chosen, (inner, hidden) if gated else (hidden, inner)
    tiling = bf12_tiling_for(outputs, inputs, entries, rule.experts, gated)
    constants = {
        "C": rule.chosen, "GATED": gated, "WEIGH_INPUTS": gated and rule.scales_inputs,
        "WEIGH_OUTPUTS": not gated and not rule.scales_inputs, "INLINE": True, "LANES": 32, "JOINED": tiling.joined,
        "BLOCK_T": tile_rows(entries, rule.experts), "BLOCK_N": tiling.block_n, "STAGES": tiling.stages,
    }  # fmt: skip
    return compiled(grouped_bf12._multiply, constants, tiling.warps)


def in_mxfp4(rows: int, gated: bool) -> Any:
    """gpt-oss's experts as they are published."""
    hidden, inner, rule = MODELS["gpt-oss"]
    entries, (outputs, inputs) = rows * rule.chosen, (inner, hidden) if gated else (hidden, inner)
    tile = tile_rows(entries, rule.experts)
    tiling = mxfp4_tiling_for(outputs, inputs, entries, rule.experts, tile, gated)
    constants = {
        "C": rule.chosen, "GATED": gated, "LIMITED": gated, "BIASED": True, "WEIGH_INPUTS": False,
        "WEIGH_OUTPUTS": not gated, "SUMS": tile <= 16, "INLINE": True, "BLOCK_T": tile, "BLOCK_N": tiling.block_n,
        "STAGES": tiling.stages,
    }  # fmt: skip
    return compiled(grouped_mxfp4._multiply, constants, tiling.warps, pairs="*u8", exponents="*u8")


def routed(model: str, rows: int, ranks: int) -> Any:
    """The choice of experts, of which one of so many ranks lists its own."""
    rule = MODELS[model][2]
    alone, width = rows <= route.BLOCK_ROWS, triton.next_power_of_2(rule.experts)
    block = max(2, triton.next_power_of_2(rows)) if alone else route.BLOCK_ROWS
    constants = {
        "P": 1, "E": rule.experts, "H": rule.experts // ranks, "EP": width, "K": rule.chosen,
        "KP": triton.next_power_of_2(rule.chosen), "KIND": route._KIND[rule.scores], "NORMED": rule.normed,
        "SCALE": 1.0, "BIASED": False, "GROUPS": 1, "CHOSEN_GROUPS": 1, "TILE": 16, "ALONE": alone, "BLOCK": block,
    }  # fmt: skip
    first = compiled(route._route, constants, 4)
    if not alone:
        listed = {name: constants[name] for name in ("E", "H", "EP", "K", "KP", "TILE", "BLOCK")}
        compiled(route._list_blocks, listed, 4)
    return first


def variants(model: str) -> dict[str, Any]:
    """Every kernel as some numbers of rows take it, once each."""
    made = {}
    if model == "qwen3 in 8 bits":
        for rows, gated, blocks in product((1, 8192), (True, False), (1, 16)):
            made[f"{rows} rows, {gated} {blocks}"] = in_fp8(rows, gated, blocks, alone=False)
        for rows, gated in product((1, 64, 128), (True, False)):
            made[f"{rows} rows of a dense layer, {gated}"] = dense_in_fp8(rows, gated)
        made["a row of a dense layer that is packed on the way"] = dense_in_fp8(1, gated=False, packs=True)
        for rows in (1, 8192):
            made[f"{rows} rows of a dense layer in blocks"] = in_fp8(rows, gated=False, blocks=16, alone=True)
        for tiling in (Fp8Tiling(128, 256, 128, 2, 4, 8, False), Fp8Tiling(64, 128, 128, 1, 5, 4, True)):
            made[f"a dense layer in tiles, {tiling}"] = tiled_in_fp8(tiling)
        quantized = {"WHOLE": True, "WIDTH": 128, "BLOCKS": 32}
        made["rows routed to 8 bits"] = compiled(quantize_rows._quantize, quantized, 4, out=FP8)
        return made
    for gated in (True, False):
        made[f"one row as routed, gated {gated}"] = one_row(model, gated)
    constants = {"C": MODELS[model][2].chosen, "BLOCK": absent_experts._BLOCK}
    made["choices routed to absent experts"] = compiled(absent_experts._fill_absent, constants, 4, out="*fp32")
    for rows in ROWS:
        for gated in (True, False):
            made[f"{rows} rows, gated {gated}"] = grouped(model, rows, gated)
            if rows <= 256 and model == "gpt-oss":
                made[f"{rows} rows in 4 bits, gated {gated}"] = in_mxfp4(rows, gated)
            if rows <= 256 and model != "gpt-oss":
                made[f"{rows} rows in 12 bits, gated {gated}"] = coded(model, rows, gated)
        for ranks in (1, 2):
            made[f"{rows} rows routed on {ranks} ranks"] = routed(model, rows, ranks)
    return made


@pytest.mark.parametrize("model", [*MODELS, "qwen3 in 8 bits"])
def test_they_fit_and_multiply_on_tensor_cores(model: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", __spec__.name, model], env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = told.splitlines()
    assert len(lines) >= len(ROWS) * 3
    for line in lines:
        shared, matmuls = map(int, re.findall(r"(\d+) bytes, (\d+) matmuls", line)[0])
        assert shared <= SHARED_MOST, line
        assert bool(matmuls) != ("routed" in line), line


if __name__ == "__main__":
    for variant, kernel in variants(sys.argv[1]).items():
        code = kernel.asm["ptx"]
        products = code.count("wgmma.mma_async") + code.count("mma.sync")
        print(f"{variant}: {kernel.metadata.shared} bytes, {products} matmuls")
