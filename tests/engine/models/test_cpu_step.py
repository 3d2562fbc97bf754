"""engine/models/cpu_step.py against an oracle in float64: what a row sees of its own keys, and of nobody else's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kvcache.layer_pools import LayerPools
from engine.kvcache.tensors import KVPool
from engine.models.config import ModelConfig, parse_decoder_config
from engine.models.cpu_step import CpuLayers, CpuStep
from engine.models.llama import kv_shape
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import SequenceSlice, pack_step, unpack_step

pytestmark = pytest.mark.usefixtures("inference")

BLOCK_TOKENS = 16
SPANS = [FULL, KeySpan(window=37), KeySpan(window=600), KeySpan(chunk=16), KeySpan(chunk=48), KeySpan(chunk=512)]
CONFIG = parse_decoder_config(
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 2048,
    }
)  # fmt: skip


@pytest.mark.parametrize("span", SPANS)
def test_a_row_attends_to_what_its_span_shows_whoever_has_the_blocks_before(span: KeySpan) -> None:
    config = replace(CONFIG, spans=(span,))
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    # (first position, rows): prompts over several chunks, and single rows before, at and behind an edge.
    slices = [(0, 70), (40, 130), (500, 300), (15, 1), (16, 1), (47, 1), (48, 1), (511, 1), (512, 1), (1000, 1)]
    widths = [-(-(start + rows) // BLOCK_TOKENS) for start, rows in slices]
    blocks = rng.permutation(sum(widths)).astype(np.int32)
    tables = np.split(blocks, np.cumsum(widths)[:-1])
    pool = KVPool(kv_shape(config, BLOCK_TOKENS, torch.float32), sum(widths))
    pools, kv_SW = LayerPools(config.kv_groups, [pool]), pool.layers[0]
    kv_SW[: sum(widths) * BLOCK_TOKENS] = float("nan")  # what nobody wrote, or another has by now
    batch = unpack_step(
        pack_step(
            [SequenceSlice([1] * rows, start, [table]) for (start, rows), table in zip(slices, tables, strict=True)],
            BLOCK_TOKENS,
        )
    )
    slots = []
    for (start, rows), table in zip(slices, tables, strict=True):
        positions = np.arange(span.first(start) // BLOCK_TOKENS * BLOCK_TOKENS, start + rows)
        slots.append(table[positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS)
        kv_SW[torch.from_numpy(slots[-1])] = torch.randn(len(positions), kv_SW.shape[1], generator=generator)
    q_THD = torch.randn(len(batch.tokens_T), config.heads, config.head_dim, generator=generator)
    step = CpuStep(batch, config, CpuLayers(config, 2048), pools, torch.empty(0, config.hidden))
    got_THD = step.attend(q_THD.clone(), 0).view(q_THD.shape)
    row = 0
    for (start, rows), own in zip(slices, slots, strict=True):
        for position in range(start, start + rows):
            seen = own[len(own) - (start + rows) + span.first(position) :][: position + 1 - span.first(position)]
            wanted_HD = oracle(config, q_THD[row], kv_SW[torch.from_numpy(seen)])
            assert (got_THD[row] - wanted_HD).abs().max() < 2e-6, (span, position)
            row += 1


def oracle(config: ModelConfig, q_HD: Tensor, kv_LW: Tensor) -> Tensor:
    kv_L2ND = kv_LW.double().view(len(kv_LW), 2, config.kv_heads, config.head_dim)
    k_LHD, v_LHD = kv_L2ND.repeat_interleave(config.heads // config.kv_heads, 2).unbind(1)
    weights_HL = (torch.einsum("hd,lhd->hl", q_HD.double(), k_LHD) * config.head_dim**-0.5).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights_HL, v_LHD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sinks", "cap"])
def test_sinks_and_caps_give_a_row_the_same_bits_whatever_comes_with_it(kind: str, dtype: torch.dtype) -> None:
    config = replace(CONFIG, attention_cap=5.0 if kind == "cap" else 0.0)
    generator = torch.Generator().manual_seed(4)
    sinks_H = torch.randn(config.heads, generator=generator) if kind == "sinks" else None
    count, keys = 9, 640
    pool = KVPool(kv_shape(config, BLOCK_TOKENS, dtype), count * keys // BLOCK_TOKENS)
    pool.layers[0][: count * keys] = torch.randn(count * keys, 64, generator=generator).to(dtype)
    q_SRHD = torch.randn(count, 3, config.heads, config.head_dim, generator=generator).to(dtype)
    tables = np.split(np.arange(count * keys // BLOCK_TOKENS, dtype=np.int32), count)
    starts = [600, 3, 63, 64, 511, 512, 601, 599, 200]

    def attended(slices: list[int], rows: int) -> Tensor:
        packed = pack_step(
            [SequenceSlice([1] * rows, starts[index], [tables[index]]) for index in slices], BLOCK_TOKENS
        )
        step = CpuStep(
            unpack_step(packed),
            config,
            CpuLayers(config, 2048),
            LayerPools(config.kv_groups, [pool]),
            torch.empty(0, 64),
        )
        q_THD = q_SRHD[slices, :rows].reshape(-1, config.heads, config.head_dim)
        return step.attend(q_THD, 0, sinks_H).view(len(slices), rows, -1)

    for rows in (1, 3):
        together = attended(list(range(count)), rows)
        for index in range(count):
            assert torch.equal(attended([index], rows)[0], together[index]), (rows, index)
    assert torch.equal(attended([0], 3)[0, 0], attended([0], 1)[0, 0])
