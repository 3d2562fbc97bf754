"""A decoder-only transformer: embedding, layers, norm, head. Plain maths over a packed step.

It does not know where the step's rows and keys lie, nor what computes them: a ForwardStep does.

T rows of the step, R rows whose logits are wanted, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kvcache.tensors import KVShape
from engine.models.config import ModelConfig
from engine.models.decoder_layer import DecoderLayer, DecoderParameters


class ForwardStep(Protocol):
    """A packed step on its way through the layers, on some device: a sum of T rows in float32, and what is done to it.

    What a linear layer gives need not be summed up yet (gpu_step.py): it is only ever handed on to the step.
    """

    def embed(self, embedding: Tensor | Bf12Weight) -> None:
        """Begins the sum with the tokens' embeddings."""
        ...

    def add_norm(self, added: Tensor | None, weight_H: Tensor) -> Tensor:
        """Adds to the sum, and gives its RMS norm in the model's dtype, [T, H]."""
        ...

    def rotate_and_write(self, qkv: Tensor, qk_norm: Tensor | None, layer: int) -> Tensor:
        """Norms (where the model does) and rotates q and k, writes K and V of the layer, gives q, [T, heads, D]."""
        ...

    def attend(self, q_THD: Tensor, layer: int) -> Tensor:
        """Each row's attention over its context, [T, heads · D]; that of the last layer stays until the rows are
        narrowed."""
        ...

    def narrow(self) -> Tensor:
        """Goes on with the R wanted rows alone, of the sum and of the last layer's attention, which it gives."""
        ...


class LlamaDecoder:
    """The model's forward pass."""

    def __init__(self, parameters: DecoderParameters) -> None:
        self.parameters = parameters

    def body(self, step: ForwardStep, beat: Callable[[], None]) -> None:
        """Computes all that writes K and V: every layer, the last one as far as its attention. Calls `beat` after
        each."""
        step.embed(self.parameters.embedding)
        added, last = None, len(self.parameters.layers) - 1
        for index, layer in enumerate(self.parameters.layers):
            q_THD = step.rotate_and_write(layer.qkv(step.add_norm(added, layer.attention_norm)), layer.qk_norm, index)
            attended_TW = step.attend(q_THD, index)
            if index < last:
                added = self._behind_attention(step, layer, attended_TW)
            beat()

    def head(self, step: ForwardStep) -> Tensor:
        """The wanted rows' logits, [R, V]: what is left of the last layer is of use to them alone."""
        added = self._behind_attention(step, self.parameters.layers[-1], step.narrow())
        return self.parameters.head.logits(step.add_norm(added, self.parameters.norm))

    def _behind_attention(self, step: ForwardStep, layer: DecoderLayer, attended_TW: Tensor) -> Tensor:
        added = layer.output(attended_TW)
        return layer.down(layer.gate_up.swiglu(step.add_norm(added, layer.mlp_norm)))


def kv_shape(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> KVShape:
    """What each slot of the model's KV cache holds."""
    return KVShape(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype)
