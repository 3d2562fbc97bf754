"""A SigLIP encoder and Gemma 3's projector: images to rows that a decoder takes in place of embeddings.

It knows no files, no prompts and no device: what is not a linear layer is torch's own, wherever the parameters lie.

B images, P patches of one, T tokens of one, H the encoder's hidden size, N heads, D head size, E the decoder's hidden
size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear_cpu import Activation, CpuLinear
from engine.models.bert import ACTIVATIONS, EncoderLayer, EncoderLinear, TorchLinear
from engine.models.decoder_config import VisionConfig


@dataclass(frozen=True, slots=True)
class VisionParameters:
    """All parameters of an encoder of images. Norms are [2, H] in float32, weight and bias; `tokens_norm` has no bias.

    bytes  what all of it takes.
    """

    patches: EncoderLinear
    positions: Tensor
    layers: list[EncoderLayer]
    norm: Tensor
    tokens_norm: Tensor
    projection: Tensor
    bytes: int


def assemble_vision(config: VisionConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> VisionParameters:
    """Takes the tensors of vision.vision_entries out of `tensors` one by one. Calls `beat` after each layer."""

    def linear(name: str, activation: Activation = Activation.NONE) -> EncoderLinear:
        weight_NK, bias_N = tensors.pop(f"{name}.weight").flatten(1), tensors.pop(f"{name}.bias")
        return (TorchLinear if weight_NK.is_cuda else CpuLinear)(weight_NK, bias_N, activation)

    weights_bytes, layers = sum(tensor.nbytes for tensor in tensors.values()), []
    patches = linear("patches")
    for index in range(config.layers):
        prefix = f"layers.{index}."
        layers.append(
            EncoderLayer(
                attention_norm=tensors.pop(f"{prefix}attention_norm").view(2, -1),
                qkv=linear(f"{prefix}qkv"),
                output=linear(f"{prefix}output"),
                norm=tensors.pop(f"{prefix}mlp_norm").view(2, -1),
                up=linear(f"{prefix}up", ACTIVATIONS[config.activation]),
                down=linear(f"{prefix}down"),
            )
        )
        beat()
    positions, projection, tokens_norm = (tensors.pop(name) for name in ("positions", "projection", "tokens_norm"))
    norm = tensors.pop("norm").view(2, -1)
    return VisionParameters(patches, positions, layers, norm, tokens_norm, projection, weights_bytes)


class SiglipEncoder:
    """The forward pass. It takes memory for some 20 numbers of H per patch, and on a GPU what attention takes."""

    def __init__(self, config: VisionConfig, parameters: VisionParameters) -> None:
        self._config = config
        self.parameters = parameters
        self._mean_3, self._std_3 = (
            torch.tensor(values, device=parameters.positions.device) for values in (config.mean, config.std)
        )

    def embeddings(self, pixels_BYX3: Tensor) -> Tensor:
        """[B, T, E] in the dtype of the parameters, of images in 8 bits a number that have the config's side."""
        config, parameters = self._config, self.parameters
        dtype, size, patches = parameters.positions.dtype, len(pixels_BYX3), config.grid**2
        rows = self._patches(pixels_BYX3).to(dtype)
        x_BPH = parameters.patches(rows).view(size, patches, -1) + parameters.positions
        x_RH = x_BPH.view(size * patches, -1)
        for layer in parameters.layers:
            x_RH = x_RH + layer.output(self._attend(layer.qkv(self._norm(x_RH, layer.attention_norm)), size))
            x_RH = x_RH + layer.down(layer.up(self._norm(x_RH, layer.norm)))
        return self._project(self._norm(x_RH, parameters.norm), size)

    def _patches(self, pixels_BYX3: Tensor) -> Tensor:
        """[B · P, 3 · patch²]: each patch's numbers, normalised, channel by channel."""
        config, grid = self._config, self._config.grid
        numbers = (pixels_BYX3.float() * (1 / 255) - self._mean_3) / self._std_3
        numbers = numbers.view(len(pixels_BYX3), grid, config.patch, grid, config.patch, 3)
        return numbers.permute(0, 1, 3, 5, 2, 4).reshape(-1, 3 * config.patch**2)

    def _attend(self, qkv_RW: Tensor, size: int) -> Tensor:
        qkv_BP3ND = qkv_RW.view(size, self._config.grid**2, 3, self._config.heads, -1)
        q_BNPD, k_BNPD, v_BNPD = qkv_BP3ND.permute(2, 0, 3, 1, 4).unbind()
        attended_BNPD = functional.scaled_dot_product_attention(q_BNPD, k_BNPD, v_BNPD)
        return attended_BNPD.transpose(1, 2).reshape(len(qkv_RW), -1)

    def _project(self, x_RH: Tensor, size: int) -> Tensor:
        config, side = self._config, int(self._config.tokens**0.5)
        square = config.grid // side
        squares = x_RH.float().view(size, side, square, side, square, -1)
        means_BTH = squares.mean((2, 4)).view(size, config.tokens, -1)
        normed_BTH = functional.rms_norm(means_BTH, (config.hidden,), self.parameters.tokens_norm, config.norm_epsilon)
        return normed_BTH.to(x_RH.dtype) @ self.parameters.projection

    def _norm(self, x_RH: Tensor, norm_2H: Tensor) -> Tensor:
        weight_H, bias_H = norm_2H
        normed_RH = functional.layer_norm(x_RH.float(), weight_H.shape, weight_H, bias_H, self._config.norm_epsilon)
        return normed_RH.to(x_RH.dtype)
