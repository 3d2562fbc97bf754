"""Llama 4's encoder of images and its projector: tiles to rows that a decoder takes in place of embeddings.

It knows as little as siglip.py.

B tiles, P patches of one and the class token behind them, R = B · P, T tokens of one, H the encoder's hidden size, C a
token's patches side by side, F pairs of numbers of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.layers.linear_cpu import Activation
from engine.models.decoder_config import VisionConfig
from engine.vision.patch_layers import PatchLayers, cut_patches, take_layers, take_linear


class Llama4Encoder:
    """A VisionEncoder. Norms are [2, H] in float32, weight and bias. Tiles do not see each other."""

    def __init__(self, config: VisionConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> None:
        """Takes the tensors of llama4_family's table out of `tensors` one by one. Calls `beat` after each layer."""
        self._config = config
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._positions_PH, self._class_H = tensors.pop("positions"), tensors.pop("class")
        self._device = self._positions_PH.device
        self._patches = take_linear(tensors, "patches")
        self._layers = PatchLayers(config, take_layers(config, tensors, beat), patch_turns(config).to(self._device))
        self._first_norm_2H, self._norm_2H = (tensors.pop(name).view(2, -1) for name in ("first_norm", "norm"))
        self._adapter_up = take_linear(tensors, "adapter_up", Activation.GELU)
        self._adapter_down = take_linear(tensors, "adapter_down", Activation.GELU)
        self._projection = take_linear(tensors, "projection")

    def embeddings(self, pixels_BYX3: Tensor) -> Tensor:
        size, positions_PH, norm = len(pixels_BYX3), self._positions_PH, self._layers.norm
        rows = cut_patches(self._config, self._normalised(pixels_BYX3)).to(positions_PH.dtype)
        patches_BPH = self._patches(rows).view(size, -1, self._config.hidden)
        x_BPH = torch.cat([patches_BPH, self._class_H.expand(size, 1, -1)], 1) + positions_PH
        x_RH = self._layers.through(norm(x_BPH.flatten(0, 1), self._first_norm_2H), size)
        tokens_BTC = self._shuffled(norm(x_RH, self._norm_2H).view(x_BPH.shape)[:, :-1])
        embedded = self._projection(self._adapter_down(self._adapter_up(tokens_BTC.flatten(0, 1))))
        return embedded.view(size, self._config.tokens, -1)

    def _normalised(self, pixels_BYX3: Tensor) -> Tensor:
        """Rounded to bfloat16 after each operation, as the numbers were that the model was trained with."""
        mean_3, std_3 = (
            torch.tensor(values, dtype=torch.bfloat16, device=self._device)
            for values in (self._config.mean, self._config.std)
        )
        return (pixels_BYX3.bfloat16() * (1 / 255) - mean_3) / std_3

    def _shuffled(self, x_BPH: Tensor) -> Tensor:
        """Each square of patches side by side, row by row."""
        shuffle, (size, _, hidden) = self._config.shuffle, x_BPH.shape
        assert shuffle is not None
        side = self._config.grid // shuffle.square
        squares = x_BPH.reshape(size, side, shuffle.square, side, shuffle.square, hidden)
        return squares.permute(0, 1, 3, 2, 4, 5).reshape(size, side**2, -1)


def patch_turns(config: VisionConfig) -> Tensor:
    """complex64 [P, F]: the first half of a head's pairs turns by a patch's column, the second by its row, both counted
    from 1. The class token does not turn."""
    assert config.shuffle is not None
    grid, half = config.grid, config.hidden // config.heads // 2
    frequencies = 1.0 / config.shuffle.rope_theta ** (torch.arange(0, half, 2).float() / half)
    along = torch.arange(1, grid + 1).float()[:, None] * frequencies
    columns, rows = along.expand(grid, grid, -1), along[:, None].expand(grid, grid, -1)
    angles_PF = torch.cat([columns, rows], -1).view(grid * grid, -1)
    angles_PF = torch.cat([angles_PF, torch.zeros(1, half)])
    return torch.polar(torch.ones_like(angles_PF), angles_PF)
