"""A decoder whose norms come before attention and MLP, as in Llama and most families: its parameters, and embedding,
layers, norm, head as plain maths over a packed step.

It does not know how a linear weight is stored, nor where a step's rows and keys lie and what computes them: a
ForwardStep does. It knows no checkpoint names and no dtypes on disk.

T rows of the step, R rows whose logits are wanted, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kvcache.tensors import KVShape
from engine.layers.linear_ranks import VocabularyShardHead
from engine.models.decoder_config import ModelConfig


class Projection(Protocol):
    """A stored weight that can multiply: x_TK → [T, N], or parts [P, T, N] that whoever takes them adds up.

    How it is stored is its own business; it takes `bytes`.
    """

    bytes: int

    def __call__(self, x_TK: Tensor) -> Tensor: ...


class Linear(Projection, Protocol):
    """A Projection with what may become of its outputs at once."""

    def swiglu(self, x_TK: Tensor) -> Tensor:
        """silu of the first half of the outputs times the second half, [T, N ÷ 2]."""
        ...

    def geglu(self, x_TK: Tensor) -> Tensor:
        """The same by gelu, as tanh approximates it."""
        ...

    def logits(self, x_TK: Tensor) -> Tensor:
        """[T, N], in one part, as sampling takes it."""
        ...


class Mlp(Protocol):
    """What comes behind attention: x_TH → [T, H] or parts, as a Projection gives them."""

    bytes: int

    def __call__(self, x_TH: Tensor, count: Tensor | None) -> Tensor:
        """`count` is how many rows the step has, on a GPU, where the bucket may have more."""
        ...


class GatedMlp:
    """A dense MLP: what `gate` lets through of the first matmul goes through the second."""

    def __init__(self, gate_up: Linear, down: Projection, activation: str) -> None:
        """`activation` is ModelConfig's."""
        self.gate_up, self.down = gate_up, down
        self.bytes = gate_up.bytes + down.bytes
        self.gate = gate_up.geglu if activation == "gelu_tanh" else gate_up.swiglu

    def __call__(self, x_TH: Tensor, count: Tensor | None) -> Tensor:
        return self.down(self.gate(x_TH))


class NoHead:
    """The head of a model that gives vectors: there is none, and what is normed is the result."""

    bytes = 0

    def logits(self, x_TK: Tensor) -> Tensor:
        return x_TK.float()


class LMHead(Protocol):
    """What becomes of the last norm."""

    bytes: int

    def logits(self, x_TK: Tensor) -> Tensor:
        """[T, V], in float32 on a CPU."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block's parameters. q, k and v are one matmul; the norms' weights are float32.

    `qk_norm` is [heads + KV heads, head size]: each head's row, so that q and k are normed at once. `sinks`, float32,
    is a logit for each head. `packs` says of both norms whether what takes their rows multiplies packed ones.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    mlp: Mlp
    sinks: Tensor | None = None
    packs: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """All parameters of a decoder: `embedding` is [vocabulary, hidden], on a GPU in 12 bits a number where its file
    has it so; `head` multiplies to the vocabulary where there is one."""

    embedding: Tensor | Bf12Weight
    layers: Sequence[DecoderLayer]
    norm: Tensor
    head: LMHead


class ForwardStep(Protocol):
    """A packed step on its way through the layers, on some device: a sum of T rows in float32, and what is done to it.

    What a linear layer gives need not be summed up yet (gpu_step.py): it is only ever handed on to the step.

    count  how many rows it has, int32 on its device, where its tensors may have more.
    """

    count: Tensor | None

    def embed(self, embedding: Tensor | Bf12Weight) -> None:
        """Begins the sum with the tokens' embeddings, scaled where the model does."""
        ...

    def add_norm(
        self, added: Tensor | None, weight_H: Tensor, behind_H: Tensor | None = None, packs: bool = False
    ) -> Tensor:
        """Adds to the sum, and gives its RMS norm in the model's dtype, [T, H]. With a weight `behind_H`, what is added
        goes through a norm of its own before. Where `packs` allows it, rows may be packed (kernels/packed_rows.py)."""
        ...

    def rotate_and_write(self, qkv: Tensor, qk_norm: Tensor | None, layer: int) -> Tensor:
        """Norms and rotates q and k as the layer does, writes K and V of the layer, gives q, [T, heads, D]."""
        ...

    def attend(self, q_THD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """Each row's attention over the keys that the layer shows it, [T, heads · D]; the last layer's stays until the
        rows are narrowed."""
        ...

    def narrow(self) -> Tensor:
        """Goes on with the R wanted rows alone, of the sum and of the last layer's attention, which it gives."""
        ...

    def cap(self, logits_RV: Tensor) -> Tensor:
        """The model's logits, capped where it caps them; the memory may be the same."""
        ...


class ResumedStep(ForwardStep, Protocol):
    """A step whose sum goes on from stage to stage."""

    def add(self, added: Tensor, behind_H: Tensor | None = None) -> None:
        """Adds to the sum as `add_norm` does."""
        ...


class LlamaDecoder:
    """The model's forward pass."""

    def __init__(self, parameters: DecoderParameters) -> None:
        self.parameters = parameters

    def body(self, step: ForwardStep, beat: Callable[[], None]) -> None:
        """Computes every layer, of the last one what writes K and V, and its attention. Calls `beat` after each."""
        step.embed(self.parameters.embedding)
        self.through(step, beat)

    def stage(self, step: ResumedStep, beat: Callable[[], None], narrow: bool) -> None:
        """Computes every layer of a step whose sum is begun, and completes the sum; of the wanted rows alone where the
        last layer is to narrow it."""
        attended_TW = self.through(step, beat)
        self.complete(step, step.narrow() if narrow else attended_TW)

    def complete(self, step: ResumedStep, attended_TW: Tensor) -> None:
        """Adds to the sum what is behind the last layer's attention."""
        step.add(self._behind_attention(step, self.parameters.layers[-1], attended_TW))

    def through(self, step: ForwardStep, beat: Callable[[], None]) -> Tensor:
        """All but what is behind the last layer's attention, which it gives."""
        added, last = None, len(self.parameters.layers) - 1
        for index, layer in enumerate(self.parameters.layers):
            normed = step.add_norm(added, layer.attention_norm, packs=layer.packs[0])
            q_THD = step.rotate_and_write(layer.qkv(normed), layer.qk_norm, index)
            attended_TW = step.attend(q_THD, index, layer.sinks)
            if index < last:
                added = self._behind_attention(step, layer, attended_TW)
            beat()
        return attended_TW

    def head(self, step: ForwardStep, own: bool = False) -> Tensor:
        """The wanted rows' logits, [R, V]: what is left of the last layer is of use to them alone. `own`: where the
        vocabulary is cut, those of this part."""
        added = self._behind_attention(step, self.parameters.layers[-1], step.narrow())
        return logits_of(self.parameters.head, step.add_norm(added, self.parameters.norm), own)

    def outputs(self, step: ForwardStep) -> Tensor:
        """The logits of the rows of a step whose sum is complete, [R, V]."""
        return step.cap(self.parameters.head.logits(step.add_norm(None, self.parameters.norm)))

    def _behind_attention(self, step: ForwardStep, layer: DecoderLayer, attended_TW: Tensor) -> Tensor:
        added = layer.output(attended_TW)
        return layer.mlp(step.add_norm(added, layer.mlp_norm, packs=layer.packs[1]), step.count)


def logits_of(head: LMHead, normed_RH: Tensor, own: bool) -> Tensor:
    """What a head makes of the last norm; `own`: where the vocabulary is cut, the logits of this part alone."""
    if not own:
        return head.logits(normed_RH)
    assert isinstance(head, VocabularyShardHead)
    return head.own.logits(normed_RH)


def kv_shape(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> KVShape:
    """What each slot of the model's KV cache holds."""
    return KVShape(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype)
