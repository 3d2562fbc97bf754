"""A SigLIP encoder and Gemma 3's projector: images to rows that a decoder takes in place of embeddings.

It knows no files, no prompts and no device: what is not a linear layer is torch's own, wherever the parameters lie.

B images, P patches of one, R = B · P, T tokens of one, H the encoder's hidden size, E the decoder's hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.decoder_config import VisionConfig
from engine.vision.patch_layers import PatchLayers, cut_patches, take_layers, take_linear


class SiglipEncoder:
    """A VisionEncoder. Norms are [2, H] in float32, weight and bias; the tokens' has no bias."""

    def __init__(self, config: VisionConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> None:
        """Takes the tensors of gemma3_family's table out of `tensors` one by one. Calls `beat` after each layer."""
        self._config = config
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._patches = take_linear(tensors, "patches")
        self._layers = PatchLayers(config, take_layers(config, tensors, beat))
        self._positions_PH, self._projection_HE = tensors.pop("positions"), tensors.pop("projection")
        self._norm_2H, self._tokens_norm_H = tensors.pop("norm").view(2, -1), tensors.pop("tokens_norm")
        self._mean_3, self._std_3 = (
            torch.tensor(values, device=self._positions_PH.device) for values in (config.mean, config.std)
        )

    def embeddings(self, pixels_BYX3: Tensor) -> Tensor:
        size, positions_PH = len(pixels_BYX3), self._positions_PH
        numbers = (pixels_BYX3.float() * (1 / 255) - self._mean_3) / self._std_3
        rows = cut_patches(self._config, numbers).to(positions_PH.dtype)
        x_BPH = self._patches(rows).view(size, *positions_PH.shape) + positions_PH
        x_RH = self._layers.through(x_BPH.flatten(0, 1), size)
        return self._project(self._layers.norm(x_RH, self._norm_2H), size)

    def _project(self, x_RH: Tensor, size: int) -> Tensor:
        config, side = self._config, int(self._config.tokens**0.5)
        square = config.grid // side
        squares = x_RH.float().view(size, side, square, side, square, -1)
        means_BTH = squares.mean((2, 4)).view(size, config.tokens, -1)
        normed_BTH = functional.rms_norm(means_BTH, (config.hidden,), self._tokens_norm_H, config.norm_epsilon)
        return normed_BTH.to(x_RH.dtype) @ self._projection_HE
