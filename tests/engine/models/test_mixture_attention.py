"""The attention of gpt-oss and of Llama 4, loaded from their tensors' names, against the reference library's modules:
rows of prompts and single rows over several windows and chunks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, Llama4TextConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextRotaryEmbedding

from engine.kernels import attention, rope
from engine.kernels.rope import Rotation
from engine.kvcache.layer_pools import LayerPools
from engine.kvcache.tensors import KVPool
from engine.layers.linear_cpu import CpuLinear
from engine.models.cpu_step import CpuLayers, CpuStep
from engine.models.decoder_config import ModelConfig
from engine.models.llama import kv_shape
from engine.models.mixture_families import GptOss, Llama4
from engine.models.rope import rope_kinds
from engine.step import attention_plan
from engine.step.layout import SequenceSlice, pack_step, unpack_step
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import plain_formats
from engine.weights.load import load_tensors

pytestmark = pytest.mark.usefixtures("inference")

BLOCK_TOKENS, TOKENS, CONTEXT_TOKENS = 16, 300, 512
CUTS = [70, 1, 1, 90, 1, 16, 1, 1, 100, 19]  # rows of each step, past the edges of windows and chunks
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS, "attn_implementation": "eager", "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "truncate": False,
}  # fmt: skip


@dataclass
class Layer:
    """One layer's attention: the reference library's, with its rows' results, and its config and tensors for ours."""

    config: ModelConfig
    x_TH: Tensor
    wanted_TH: Tensor
    tensors: dict[str, Tensor]

    def linear(self, name: str) -> CpuLinear:
        return CpuLinear(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def gpt_oss(index: int, folder: Path) -> Layer:
    theirs = GptOssConfig(**SIZES, num_hidden_layers=2, sliding_window=37, rope_parameters=YARN)
    turns = GptOssRotaryEmbedding(theirs)
    return made(GptOss(), theirs, GptOssAttention(theirs, index), turns, index, folder, "GptOssForCausalLM")


def llama_4(index: int, folder: Path) -> Layer:
    theirs = Llama4TextConfig(
        **SIZES, num_hidden_layers=4, attention_chunk_size=48, floor_scale=16, attn_scale=0.4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    turns = Llama4TextRotaryEmbedding(theirs)
    return made(Llama4(), theirs, Llama4TextAttention(theirs, index), turns, index, folder, "Llama4ForCausalLM")


def made(
    family: GptOss | Llama4, theirs: Any, module: Any, turns: Any, index: int, folder: Path, architecture: str
) -> Layer:
    generator = torch.Generator().manual_seed(index)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    config = family.config({**theirs.to_dict(), "architectures": [architecture]})
    tensors = {f"self_attn.{name}": tensor.contiguous() for name, tensor in module.state_dict().items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    table = family.attention(config, index, "", "")
    formats = plain_formats(table, torch.float32)
    loaded = load_tensors(Checkpoint(folder).tensors, table, formats, torch.device("cpu"), lambda: None)
    x_TH = torch.randn(TOKENS, 64, generator=generator)
    positions = torch.arange(TOKENS)
    seen_TL = positions[None] <= positions[:, None]
    seen_TL &= (
        positions[None] >= torch.tensor([config.spans[index].first(position) for position in range(TOKENS)])[:, None]
    )
    mask = torch.zeros(TOKENS, TOKENS).masked_fill_(~seen_TL, float("-inf"))[None, None]
    wanted = module.eval()(x_TH[None], turns(x_TH[None], positions[None]), mask)[0][0]
    alone = replace(config, layers=1, spans=config.spans[index : index + 1], ropes=config.ropes[index : index + 1])
    return Layer(alone, x_TH, wanted, loaded)


LAYERS: dict[str, Callable[[Path], Layer]] = {
    "gpt-oss's window": lambda folder: gpt_oss(0, folder),
    "gpt-oss's full layer": lambda folder: gpt_oss(1, folder),
    "Llama 4's chunk": lambda folder: llama_4(0, folder),
    "Llama 4's full layer": lambda folder: llama_4(3, folder),
}


def steps_of(rng: np.random.Generator) -> Any:
    """The packed steps of one sequence beside another that computes the same rows, in blocks of their own."""
    blocks = rng.permutation(2 * TOKENS // BLOCK_TOKENS + 4).astype(np.int32)
    tables = np.split(blocks[: len(blocks) // 2 * 2], 2)
    start = 0
    for rows in CUTS:
        yield start, pack_step([SequenceSlice([1] * rows, start, [table]) for table in tables], BLOCK_TOKENS)
        start += rows
    assert start == TOKENS


@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_the_reference_librarys(name: str, tmp_path: Path) -> None:
    layer = LAYERS[name](tmp_path / "layer")
    config, rng = layer.config, np.random.default_rng(1)
    pool = KVPool(kv_shape(config, BLOCK_TOKENS, torch.float32), 2 * TOKENS // BLOCK_TOKENS + 4)
    pools = LayerPools(config.kv_groups, [pool])
    pool.layers[0][: pool.blocks * BLOCK_TOKENS] = float("nan")
    qkv, output = layer.linear("qkv"), layer.linear("output")
    for start, packed in steps_of(rng):
        batch = unpack_step(packed)
        step = CpuStep(batch, config, CpuLayers(config, CONTEXT_TOKENS), pools, torch.empty(0, 64))
        step._dtype = torch.float32
        rows = len(batch.tokens_T) // 2
        x_TH = layer.x_TH[start : start + rows].repeat(2, 1)
        q_THD = step.rotate_and_write(qkv(x_TH), None, 0)
        got_TH = output(step.attend(q_THD, 0, layer.tensors.get("sinks")))
        wanted_TH = layer.wanted_TH[start : start + rows].repeat(2, 1)
        assert (got_TH - wanted_TH).abs().max() < 1e-4, start


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_compute_the_same(name: str, tmp_path: Path) -> None:
    """Some steps of them, for the interpreter is slow: KV of all steps is written."""
    layer = LAYERS[name](tmp_path / "layer")
    config, rng = layer.config, np.random.default_rng(1)
    (kind,), (span,) = rope_kinds(config), config.spans
    rotation = Rotation(None)
    if kind is not None:
        rotation = Rotation(kind.tables(32, CONTEXT_TOKENS), kind.period or 0, config.rotated_norm)
    elif config.temperature is not None:
        rotation = Rotation(None, unit=config.temperature.unit, gain=config.temperature.gain)
    cpu = torch.device("cpu")
    plan = replace(
        attention.attention_layout((span,), 4, 2, 64, cpu), narrow_programs=7, few_programs=7, wide_programs=7
    )
    kv_SW = torch.full(((2 * TOKENS // BLOCK_TOKENS + 4) * BLOCK_TOKENS, 128), float("nan"))
    qkv, output = layer.linear("qkv"), layer.linear("output")
    for start, packed in steps_of(rng):
        work = attention_plan.plan_attention(packed, unpack_step(packed), plan)
        words = torch.from_numpy(np.concatenate((packed, work.words)))
        rows = len(unpack_step(packed).tokens_T) // 2
        x_TH = layer.x_TH[start : start + rows].repeat(2, 1)
        q_THD = torch.empty(2 * rows, 4, 32)
        rope.rotate_and_write(words, qkv(x_TH)[None], None, config.norm_epsilon, rotation, q_THD, kv_SW, 0)
        if rows > 20 and start:
            continue
        scratch = attention.AttentionScratch.make(plan, 4, 32, 2 * rows, cpu)
        out_THD = torch.empty_like(q_THD)
        attention.attend(
            words, q_THD, kv_SW, out_THD, scratch, plan, span, BLOCK_TOKENS, work.wide, config.attention_scale,
            sinks_H=layer.tensors.get("sinks"),
        )  # fmt: skip
        wanted_TH = layer.wanted_TH[start : start + rows].repeat(2, 1)
        assert (output(out_THD.view(2 * rows, -1)) - wanted_TH).abs().max() < 1e-4, start
