"""What encoders of images compute alike: pixels cut into patches, and layers in which the rows of an image see each
other. It knows no family.

B images, P rows of one, R = B · P, H hidden size, N heads, D head size.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear_cpu import Activation, CpuLinear
from engine.models.bert import ACTIVATIONS, EncoderLayer, EncoderLinear, TorchLinear
from engine.models.decoder_config import VisionConfig


class VisionEncoder(Protocol):
    """A forward pass with its parameters, which take `bytes`."""

    bytes: int

    def embeddings(self, pixels_BYX3: Tensor) -> Tensor:
        """[B, tokens, decoder's hidden size] in the dtype of the parameters, of images in 8 bits a number that have the
        config's side. It takes memory for some 20 numbers of H per patch, and on a GPU what attention takes."""
        ...


def take_linear(tensors: dict[str, Tensor], name: str, activation: Activation = Activation.NONE) -> EncoderLinear:
    """The linear layer of this name, whose tensors leave `tensors`."""
    weight_NK, bias_N = tensors.pop(f"{name}.weight").flatten(1), tensors.pop(f"{name}.bias", None)
    return (TorchLinear if weight_NK.is_cuda else CpuLinear)(weight_NK, bias_N, activation)


def take_layers(config: VisionConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> list[EncoderLayer]:
    """All layers, whose tensors leave `tensors` one by one. Calls `beat` after each."""
    layers = []
    for index in range(config.layers):
        prefix = f"layers.{index}."
        layers.append(
            EncoderLayer(
                attention_norm=tensors.pop(f"{prefix}attention_norm").view(2, -1),
                qkv=take_linear(tensors, f"{prefix}qkv"),
                output=take_linear(tensors, f"{prefix}output"),
                norm=tensors.pop(f"{prefix}mlp_norm").view(2, -1),
                up=take_linear(tensors, f"{prefix}up", ACTIVATIONS[config.activation]),
                down=take_linear(tensors, f"{prefix}down"),
            )
        )
        beat()
    return layers


def cut_patches(config: VisionConfig, numbers_BYX3: Tensor) -> Tensor:
    """[B · patches, 3 · patch²]: each patch's numbers, channel by channel."""
    grid = config.grid
    cut = numbers_BYX3.view(len(numbers_BYX3), grid, config.patch, grid, config.patch, 3)
    return cut.permute(0, 1, 3, 5, 2, 4).reshape(-1, 3 * config.patch**2)


class PatchLayers:
    """Layers with a norm before attention and one before a plain MLP."""

    def __init__(self, config: VisionConfig, layers: list[EncoderLayer], turns_PF: Tensor | None = None) -> None:
        """`turns_PF` are complex: by them each two neighbours among a head's numbers of q and k are turned."""
        self._config = config
        self._layers = layers
        self._turns_P11F = None if turns_PF is None else turns_PF[:, None, None]

    def through(self, x_RH: Tensor, size: int) -> Tensor:
        """The rows of `size` images behind all layers."""
        for layer in self._layers:
            x_RH = x_RH + layer.output(self._attend(layer.qkv(self.norm(x_RH, layer.attention_norm)), size))
            x_RH = x_RH + layer.down(layer.up(self.norm(x_RH, layer.norm)))
        return x_RH

    def norm(self, x_RH: Tensor, norm_2H: Tensor) -> Tensor:
        weight_H, bias_H = norm_2H
        if x_RH.is_cuda:  # it computes in float32 all the same, and in one pass
            weight_H, bias_H = norm_2H.to(x_RH.dtype)
            return functional.layer_norm(x_RH, weight_H.shape, weight_H, bias_H, self._config.norm_epsilon)
        normed_RH = functional.layer_norm(x_RH.float(), weight_H.shape, weight_H, bias_H, self._config.norm_epsilon)
        return normed_RH.to(x_RH.dtype)

    def _attend(self, qkv_RW: Tensor, size: int) -> Tensor:
        qkv_BP3ND = qkv_RW.view(size, len(qkv_RW) // size, 3, self._config.heads, -1)
        if self._turns_P11F is not None:
            qk_BP2ND = qkv_BP3ND[:, :, :2]
            qk_BP2ND.copy_(_turned(qk_BP2ND, self._turns_P11F))
        q_BNPD, k_BNPD, v_BNPD = qkv_BP3ND.permute(2, 0, 3, 1, 4).unbind()
        attended_BNPD = functional.scaled_dot_product_attention(q_BNPD, k_BNPD, v_BNPD)
        return attended_BNPD.transpose(1, 2).reshape(len(qkv_RW), -1)


def _turned(qk_BP2ND: Tensor, turns_P11F: Tensor) -> Tensor:
    pairs_BP2NF = torch.view_as_complex(qk_BP2ND.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_BP2NF * turns_P11F).flatten(-2)
