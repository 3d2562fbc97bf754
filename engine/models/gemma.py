"""Gemma: norms before attention and MLP, and behind them before what they give is added; logits may be capped.

It knows as little as llama.py, whose parts it uses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine.models.llama import DecoderLayer, DecoderParameters, ForwardStep, ResumedStep, logits_of

NORMS_BEHIND: Final = ("behind_attention_norm", "behind_mlp_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaLayer(DecoderLayer):
    """A block's parameters with the norms behind its two halves."""

    behind_attention_norm: Tensor
    behind_mlp_norm: Tensor


class GemmaDecoder:
    """The model's forward pass, with the methods of llama.LlamaDecoder."""

    def __init__(self, parameters: DecoderParameters) -> None:
        self.parameters = parameters
        self._layers = [layer for layer in parameters.layers if isinstance(layer, GemmaLayer)]
        assert len(self._layers) == len(parameters.layers)

    def body(self, step: ForwardStep, beat: Callable[[], None]) -> None:
        step.embed(self.parameters.embedding)
        self.through(step, beat)

    def stage(self, step: ResumedStep, beat: Callable[[], None], narrow: bool) -> None:
        attended_TW = self.through(step, beat)
        self.complete(step, step.narrow() if narrow else attended_TW)

    def complete(self, step: ResumedStep, attended_TW: Tensor) -> None:
        last = self._layers[-1]
        step.add(self._behind_attention(step, last, attended_TW), last.behind_mlp_norm)

    def through(self, step: ForwardStep, beat: Callable[[], None]) -> Tensor:
        added, behind = None, None
        for index, layer in enumerate(self._layers):
            normed = step.add_norm(added, layer.attention_norm, behind, layer.packs[0])
            q_THD = step.rotate_and_write(layer.qkv(normed), layer.qk_norm, index)
            attended_TW = step.attend(q_THD, index)
            if index < len(self._layers) - 1:
                added, behind = self._behind_attention(step, layer, attended_TW), layer.behind_mlp_norm
            beat()
        return attended_TW

    def head(self, step: ForwardStep, own: bool = False) -> Tensor:
        last = self._layers[-1]
        added = self._behind_attention(step, last, step.narrow())
        normed_RH = step.add_norm(added, self.parameters.norm, last.behind_mlp_norm)
        return step.cap(logits_of(self.parameters.head, normed_RH, own))

    def outputs(self, step: ForwardStep) -> Tensor:
        return step.cap(self.parameters.head.logits(step.add_norm(None, self.parameters.norm)))

    def _behind_attention(self, step: ForwardStep, layer: GemmaLayer, attended_TW: Tensor) -> Tensor:
        attended = layer.output(attended_TW)
        normed = step.add_norm(attended, layer.mlp_norm, layer.behind_attention_norm, layer.packs[1])
        return layer.mlp(normed, step.count)
