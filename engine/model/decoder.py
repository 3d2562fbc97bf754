"""A decoder-only transformer: embedding, layers, norm, head. Plain maths over a packed step and a KV pool.

T rows of the step, R rows whose logits are wanted, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kv import KvPool
from engine.model.attention import Step, attend, plan
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Parameters, rotary_tables


class Decoder:
    """The model's forward pass. `context_tokens` bounds the positions it will be asked for."""

    def __init__(self, config: ModelConfig, parameters: Parameters, context_tokens: int, ops: ModuleType) -> None:
        self.config = config
        self.parameters = parameters
        self.ops = ops
        self.scale = config.head_dim**-0.5
        self._cos, self._sin = rotary_tables(config.rope, config.head_dim, context_tokens)
        self._windows = frozenset(config.windows)

    def forward(self, batch: Batch, pool: KvPool, beat: Callable[[], None]) -> Tensor:
        """Writes the step's K and V into the pool and returns float32 logits [R, V]; calls `beat` after each layer."""
        config, parameters = self.config, self.parameters
        step = plan(batch, self._windows, pool, config.heads // config.kv_heads, self.ops)
        cos_T1D, sin_T1D = self._cos[step.positions_T, None], self._sin[step.positions_T, None]
        # The sum that runs through the layers is kept in float32, whatever the weights are.
        x_TH = torch.nn.functional.embedding(step.tokens_T, parameters.embedding).float()
        for index, layer in enumerate(parameters.layers):
            x_TH.add_(self._attention(index, layer, x_TH, step, cos_T1D, sin_T1D, pool))
            x_TH.add_(self._mlp(layer, x_TH))
            beat()
        if len(step.rows_R) == 0:
            return x_TH.new_empty(0, config.vocabulary)
        x_RH = x_TH.index_select(0, step.rows_R)
        return parameters.head(self._norm(x_RH, parameters.norm)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = self.ops.rms_norm(x, weight, self.config.norm_epsilon, self.parameters.embedding.dtype)
        return normed

    def _attention(
        self, index: int, layer: Layer, x_TH: Tensor, step: Step, cos_T1D: Tensor, sin_T1D: Tensor, pool: KvPool
    ) -> Tensor:
        config, ops = self.config, self.ops
        qkv_TW = layer.qkv(self._norm(x_TH, layer.attention_norm))
        qkv_THD = qkv_TW.view(len(x_TH), -1, config.head_dim)
        qk_THD = qkv_THD[:, : config.heads + config.kv_heads]
        if layer.qk_norm is not None:
            qk_THD.copy_(self._norm(qk_THD, layer.qk_norm))
        ops.rotate_(qk_THD, cos_T1D, sin_T1D)
        pool.write(index, step.slots_T, qkv_TW[:, config.heads * config.head_dim :])
        q_THD = qkv_THD[:, : config.heads]
        return layer.output(attend(q_THD, index, step.groups[config.windows[index]], pool, self.scale, ops))

    def _mlp(self, layer: Layer, x_TH: Tensor) -> Tensor:
        return layer.down(self.ops.silu_and_multiply(layer.gate_up(self._norm(x_TH, layer.mlp_norm))))
