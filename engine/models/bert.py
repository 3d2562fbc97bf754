"""An encoder of the BERT kind: its parameters, and its forward pass over the packed texts of a step.

Texts lie one behind the other without padding; only attention sees them in a rectangle, those of about the same length
together. On a CPU a text's vector does not depend on the texts beside it, to the last bit: how it is padded there
follows from its own length, and all else goes row by row. On a GPU the matrix library picks its kernels by the number
of rows, so that it may differ in its last bits.

T rows of all texts, S texts, L tokens of the longest of a group, H hidden size, N heads, D head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.layers.linear_cpu import ACTIVATION_FUNCTIONS, Activation, CpuLinear
from engine.models.config import EncoderConfig
from engine.protocol.types import Pooling
from engine.step.encoder_layout import POOLINGS, TextBatch
from engine.step.layout import Int32s

PAD_STEP: Final = 16  # lengths up to PAD_STEP_FROM are padded to a multiple of this for attention,
PAD_STEP_FROM: Final = 128  # and longer ones to a multiple of this
ACTIVATIONS: Final = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


class TorchLinear:
    """A linear layer as torch computes it: on a GPU, where nothing is gained by packing."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, activation: Activation) -> None:
        self._weight_NK = weight_NK
        self._bias_N = bias_N
        self._activate = ACTIVATION_FUNCTIONS[activation]

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._activate(functional.linear(x_TK, self._weight_NK, self._bias_N))


EncoderLinear = CpuLinear | TorchLinear


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer's parameters. Norms are [2, H] in float32: weight and bias."""

    qkv: EncoderLinear
    output: EncoderLinear
    attention_norm: Tensor
    up: EncoderLinear
    down: EncoderLinear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class EncoderParameters:
    """All parameters of an encoder. The three tables are added up for each token.

    head    a pooler of a text's first row, and what makes one number of that; None where the model gives vectors.
    bytes   what all of it takes.
    """

    words: Tensor
    positions: Tensor
    types: Tensor
    norm: Tensor
    layers: list[EncoderLayer]
    head: tuple[EncoderLinear, EncoderLinear] | None
    bytes: int


def assemble_encoder(config: EncoderConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> EncoderParameters:
    """Takes the tensors of weight_names.encoder_entries out of `tensors` one by one. Calls `beat` after each layer."""

    def linear(name: str, activation: Activation = Activation.NONE) -> EncoderLinear:
        weight_NK, bias_N = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias")
        return (TorchLinear if weight_NK.is_cuda else CpuLinear)(weight_NK, bias_N, activation)

    def norm(name: str) -> Tensor:
        return tensors.pop(name).view(2, -1)

    weights_bytes, layers = sum(tensor.nbytes for tensor in tensors.values()), []
    for index in range(config.layers):
        prefix = f"layers.{index}."
        layers.append(
            EncoderLayer(
                qkv=linear(f"{prefix}qkv"),
                output=linear(f"{prefix}output"),
                attention_norm=norm(f"{prefix}attention_norm"),
                up=linear(f"{prefix}up", ACTIVATIONS[config.activation]),
                down=linear(f"{prefix}down"),
                norm=norm(f"{prefix}norm"),
            )
        )
        beat()
    head = (linear("pooler", Activation.TANH), linear("score")) if config.scores else None
    words, positions, types = (tensors.pop(name) for name in ("words", "positions", "types"))
    return EncoderParameters(words, positions, types, norm("norm"), layers, head, weights_bytes)


class BertEncoder:
    """The model's forward pass. A step takes memory for some 20 numbers of H per row."""

    def __init__(self, config: EncoderConfig, parameters: EncoderParameters) -> None:
        self._config = config
        self._parameters = parameters
        self._device = parameters.words.device

    def vectors(self, texts: TextBatch, beat: Callable[[], None]) -> Tensor:
        """A float32 row for each text: [S, H], or [S, 1] where the model scores. Calls `beat` after each layer."""
        parameters, dtype = self._parameters, self._parameters.words.dtype
        x_TH = self._norm(self._embedded(texts), parameters.norm)
        groups = list(_groups(texts.lengths, dtype, self._device))
        for layer in parameters.layers:
            attended_TH = self._attend(layer.qkv(x_TH.to(dtype)), groups)
            x_TH = self._norm(x_TH + layer.output(attended_TH), layer.attention_norm)
            x_TH = self._norm(x_TH + layer.down(layer.up(x_TH.to(dtype))), layer.norm)
            beat()
        return self._pooled(x_TH, texts)

    def _embedded(self, texts: TextBatch) -> Tensor:
        config, parameters = self._config, self._parameters
        starts_S, lengths_S = texts.starts_S1[:-1], np.diff(texts.starts_S1)
        positions_T = np.arange(len(texts.tokens_T), dtype=np.int32) - np.repeat(starts_S, lengths_S)
        types_T = _types(texts) if config.scores and config.types > 1 else np.zeros_like(positions_T)
        rows = ((parameters.words, texts.tokens_T), (parameters.types, types_T))
        words_TH, types_TH = (table.index_select(0, self._on_device(index_T)).float() for table, index_T in rows)
        positions_TH = parameters.positions.index_select(0, self._on_device(positions_T + config.first_position))
        return words_TH + types_TH + positions_TH.float()

    def _attend(self, qkv_TW: Tensor, groups: "list[_PaddedGroup]") -> Tensor:
        heads, hidden = self._config.heads, self._config.hidden
        attended = []
        for group in groups:
            qkv_SL3ND = qkv_TW.index_select(0, group.rows_F).view(group.texts, group.length, 3, heads, -1)
            q_SNLD, k_SNLD, v_SNLD = qkv_SL3ND.permute(2, 0, 3, 1, 4).unbind()
            out_SNLD = functional.scaled_dot_product_attention(q_SNLD, k_SNLD, v_SNLD, group.mask_S1LL)
            attended.append(out_SNLD.transpose(1, 2).reshape(-1, hidden).index_select(0, group.kept_T))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _pooled(self, x_TH: Tensor, texts: TextBatch) -> Tensor:
        vectors_SH = x_TH.index_select(0, self._on_device(texts.starts_S1[:-1]))
        if self._parameters.head is not None:
            pooler, score = self._parameters.head
            return score(pooler(vectors_SH.to(self._parameters.words.dtype))).float()
        means_S = np.flatnonzero(texts.poolings_S == POOLINGS.index(Pooling.MEAN))
        if len(means_S):
            lengths_S, rows = self._on_device(np.diff(texts.starts_S1)), self._on_device(means_S)
            vectors_SH[rows] = torch.segment_reduce(x_TH, "mean", lengths=lengths_S, axis=0)[rows]
        return vectors_SH

    def _norm(self, x_TH: Tensor, norm_2H: Tensor) -> Tensor:
        weight_H, bias_H = norm_2H
        return functional.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, self._config.norm_epsilon)

    def _on_device(self, index: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(index.astype(np.int64)).to(self._device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _PaddedGroup:
    """Texts that follow each other in the step and are attended in one rectangle, padded to `length`."""

    texts: int
    length: int
    rows_F: Tensor  # int64 [texts · length]: the row of each place; padding repeats its text's first row
    kept_T: Tensor  # int64: which places are no padding
    mask_S1LL: Tensor  # 0 or −inf


def padded_length(length: int) -> int:
    """The length that a text is padded to for attention, whatever its company."""
    step = PAD_STEP if length <= PAD_STEP_FROM else PAD_STEP_FROM
    return -(-length // step) * step


def _groups(lengths: list[int], dtype: torch.dtype, device: torch.device) -> Iterator[_PaddedGroup]:
    first = 0
    for length, members in groupby(lengths, padded_length):
        lengths_S = np.array(list(members))
        firsts_S = first + np.cumsum(lengths_S) - lengths_S
        first += int(lengths_S.sum())
        inside_SL = np.arange(length) < lengths_S[:, None]
        rows_SL = np.where(inside_SL, firsts_S[:, None] + np.arange(length), firsts_S[:, None])
        mask_SL = np.where(inside_SL, 0.0, -np.inf).astype(np.float32)
        mask_S1LL = torch.from_numpy(mask_SL).to(device, dtype)[:, None, None].expand(-1, -1, length, -1)
        rows_F, kept_T = (torch.from_numpy(rows).to(device) for rows in (rows_SL.ravel(), np.flatnonzero(inside_SL)))
        yield _PaddedGroup(len(lengths_S), length, rows_F, kept_T, mask_S1LL)


def _types(texts: TextBatch) -> Int32s:
    """1 for tokens of a text's second part. Its two parts end with the same control token, which is in neither."""
    types_T = np.zeros_like(texts.tokens_T)
    for first, last in pairwise(texts.starts_S1.tolist()):
        tokens = texts.tokens_T[first:last]
        types_T[first:last][1 + int((tokens == tokens[-1]).argmax()) :] = 1
    return types_T
