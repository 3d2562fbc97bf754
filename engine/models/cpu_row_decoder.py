"""One row's way through a decoder on a CPU in few calls: two of cpu_row.c's for each layer, and its attention between
them. Each of its numbers has the bits that it has among many rows (cpu_step.py), where the same functions compute it.

It takes decoders whose layers are plain: norms before, silu, no biases, bfloat16. It knows no sequences, no sampling.
"""

import ctypes
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from engine.kernels import reference as ops
from engine.kvcache.layer_pools import LayerPools
from engine.layers.cpu_row import HEAD_MULTIPLE, Matrix, RowFunctions, RowLayer, RowStep, row_functions
from engine.layers.linear_cpu import CpuLinear
from engine.layers.row_ops import add_norm
from engine.models.cpu_step import CpuLayers, CpuStep
from engine.models.decoder_config import ModelConfig
from engine.models.llama import DecoderLayer, DecoderParameters, GatedMlp

_BF16: Final = torch.bfloat16


class CpuRowDecoder:
    """A decoder's forward pass for one row, with memory of its own that each pass uses anew."""

    def __init__(
        self, config: ModelConfig, parameters: DecoderParameters, layers: CpuLayers, pools: LayerPools,
        matrices: list[list[Matrix]], functions: RowFunctions,
    ) -> None:  # fmt: skip
        """`matrices` are each layer's of q, k and v, the output, gate and up, and down."""
        self._config, self._parameters, self._layers, self._functions = config, parameters, layers, functions
        widths = [matrix.outputs for row in matrices for matrix in row]
        self._added = torch.empty(1, config.hidden, dtype=_BF16)
        self._wide, self._narrow = (torch.empty(max(widths), dtype=_BF16) for _ in range(2))
        self._rows = [
            RowLayer(
                *row, layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr(),
                0 if layer.qk_norm is None else layer.qk_norm.data_ptr(), pools.layers[index].data_ptr(),
            )
            for index, (layer, row) in enumerate(zip(parameters.layers, matrices, strict=True))
        ]  # fmt: skip

    def logits(self, step: CpuStep, beat: Callable[[], None]) -> Tensor:
        """The row's logits, [1, V]. Calls `beat` after each layer."""
        config, functions = self._config, self._functions
        step.embed(self._parameters.embedding)
        row_step = RowStep(
            config.hidden, config.heads, config.kv_heads, config.head_dim, step.sum_TH.data_ptr(),
            self._added.data_ptr(), self._wide.data_ptr(), self._narrow.data_ptr(), config.norm_epsilon,
            torch.get_num_threads(),
        )  # fmt: skip
        state = ctypes.byref(row_step)
        reads = [_read_of(step, group) for group in range(len(step.groups))]
        turns = [(cos.data_ptr(), sin.data_ptr()) for cos, sin in step.turns]
        for index, layer in enumerate(self._rows):
            group, table = self._layers.group_of[index], self._layers.table_of[index]
            cos, sin = (None, None) if table is None else turns[table]
            (attention,) = step.groups[group]
            functions.before_attention(ctypes.byref(layer), state, index == 0, cos, sin, *reads[group])
            out = ops.attend(attention.q, attention.k, attention.v, attention.mask_S1QL, config.attention_scale)
            _, kv_stride, head_stride, _ = out.stride()
            functions.behind_attention(ctypes.byref(layer), state, out.data_ptr(), kv_stride, head_stride)
            beat()
        normed = add_norm(step.sum_TH, self._added, self._parameters.norm, config.norm_epsilon, _BF16)
        return step.cap(self._parameters.head.logits(normed))


def _read_of(step: CpuStep, group: int) -> tuple[int, ...]:
    """Where the row's K and V go, the blocks that it reads, and where its q is taken, as before_attention has them."""
    (attention,) = step.groups[group]
    keys = attention.keys
    blocks, rows = keys.blocks_B.shape[0], keys.memory_LW.shape[0]
    return (
        int(step.slots_GT[group, 0]), keys.blocks_B.data_ptr(), blocks, rows // blocks * keys.memory_LW.stride(0) * 2,
        keys.memory_LW.data_ptr(), keys.unwritten_U.data_ptr(), keys.unwritten_U.shape[0], attention.q.data_ptr(),
        attention.q.stride(1),
    )  # fmt: skip


def row_decoder(
    config: ModelConfig, parameters: DecoderParameters, layers: CpuLayers, pools: LayerPools
) -> CpuRowDecoder | None:
    """None where nothing is compiled, or a layer is not plain."""
    functions = row_functions()
    special = config.temperature is not None or config.rotated_norm or config.attention_cap or config.sinks
    plain = pools.shape.dtype is _BF16 and config.head_dim % HEAD_MULTIPLE == 0 and not special and not config.vectors
    if functions is None or not plain or config.architecture.startswith("Gemma"):
        return None
    matrices = [_matrices(layer) for layer in parameters.layers]
    found = [row for row in matrices if row is not None]
    if len(found) != len(matrices):
        return None
    return CpuRowDecoder(config, parameters, layers, pools, found, functions)


def _matrices(layer: DecoderLayer) -> list[Matrix] | None:
    mlp = layer.mlp
    if not isinstance(mlp, GatedMlp) or not isinstance(mlp.gate_up, CpuLinear) or mlp.gate != mlp.gate_up.swiglu:
        return None
    matrices = []
    for linear in (layer.qkv, layer.output, mlp.gate_up, mlp.down):
        if not isinstance(linear, CpuLinear) or linear.row_alone is None:
            return None
        matrices.append(linear.row_alone.matrix)
    return matrices
