"""engine/step/attention_plan.py with engine/kernels/attention.py against an oracle that knows neither: mixtures of
prompts, single rows and segments; what a row must not read is NaN, and so is the output before."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from engine.kernels import attention
from engine.protocol.types import SamplingParams
from engine.step import attention_plan
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import PrefixSegment, SequenceSlice, pack_step, unpack_step
from tests.support.steps import DEVICE, error, poisoned, random

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    """Slice i computes chunks[i] rows from position starts[i]; the members of a segment share its keys' blocks."""

    chunks: list[int]
    starts: list[int]
    segments: list[PrefixSegment] = field(default_factory=list)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_tokens: int = 16
    spans: tuple[KeySpan, ...] = (FULL,)
    softcap: float = 0.0
    scale: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    slots: int = 512
    programs: int = 7


def tables_of(case: Case, rng: np.random.Generator) -> list[np.ndarray]:
    size = case.block_tokens
    lengths = [-(-(start + chunk) // size) for start, chunk in zip(case.starts, case.chunks, strict=True)]
    order = rng.permutation(sum(lengths) + 5).astype(np.int32)
    tables = np.split(order[: sum(lengths)], np.cumsum(lengths)[:-1])
    for segment in sorted(case.segments, key=lambda segment: segment.first):
        first, last = segment.first // size, segment.last // size
        for member in segment.members:
            tables[member][first:last] = tables[segment.members[0]][first:last]
    return tables


def check(case: Case, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    tables = tables_of(case, rng)
    shown = [[span.first(start) // case.block_tokens for span in case.spans] for start in case.starts]
    slices = [
        SequenceSlice([1] * chunk, start, [table[first:] for first in firsts], SamplingParams(), table_starts=firsts)
        for chunk, start, table, firsts in zip(case.chunks, case.starts, tables, shown, strict=True)
    ]
    groups = range(len(case.spans))
    everywhere = [structs.replace(segment, group=group) for segment in case.segments for group in groups]
    packed = pack_step(slices, case.block_tokens, everywhere)
    batch = unpack_step(packed)
    layout = replace(
        attention.attention_layout(case.spans, case.heads, case.kv_heads, 512, DEVICE), slots=case.slots,
    )  # fmt: skip
    if DEVICE.type == "cpu":
        layout = replace(layout, narrow_programs=case.programs, few_programs=case.programs, wide_programs=case.programs)
    work = attention_plan.plan_attention(packed, batch, layout)
    step = torch.from_numpy(np.concatenate((packed, work.words))).to(DEVICE)
    rows = len(batch.tokens_T)
    slices_T = np.repeat(np.arange(len(slices)), np.diff(batch.query_starts_S1))

    blocks = sum(len(table) for table in tables) + 5
    kv_SW = poisoned(blocks * case.block_tokens, 2 * case.kv_heads * case.head_dim, dtype=case.dtype)
    seen = [
        table[np.arange(start + chunk) // case.block_tokens].astype(np.int64) * case.block_tokens
        + np.arange(start + chunk) % case.block_tokens
        for table, start, chunk in zip(tables, case.starts, case.chunks, strict=True)
    ]
    slots = torch.from_numpy(np.unique(np.concatenate(seen))).to(DEVICE)
    kv_SW[slots] = random(len(slots), kv_SW.shape[1], seed=seed + 1).to(case.dtype)
    kv_SW = kv_SW.to(case.kv_dtype or case.dtype)
    q_THD = random(rows + 2, case.heads, case.head_dim, dtype=case.dtype, seed=seed + 2)
    scratch = attention.AttentionScratch.make(layout, case.heads, case.head_dim, rows + 2, DEVICE)
    sinks_H = 3 * random(case.heads, seed=seed + 3) if case.sinks else None
    for span in case.spans:
        out_THD = poisoned(rows + 2, case.heads, case.head_dim, dtype=case.dtype)
        attention.attend(
            step, q_THD, kv_SW, out_THD, scratch, layout, span, case.block_tokens, work.wide, case.scale, case.softcap,
            sinks_H,
        )  # fmt: skip
        wanted_THD = oracle(case, q_THD[:rows], kv_SW, sinks_H, tables, slices_T, batch.positions_T, span)
        assert error(out_THD[:rows], wanted_THD) < TOLERANCE[case.dtype], (case, span)
        assert out_THD[rows:].isnan().all()
        assert not scratch.counters.any()


def oracle(
    case: Case, q_THD: Tensor, kv_SW: Tensor, sinks_H: Tensor | None, tables: list[np.ndarray], slices_T: np.ndarray,
    positions_T: np.ndarray, span: KeySpan,
) -> Tensor:  # fmt: skip
    """Each row's attention over the keys up to its position, one row after the other in float64."""
    heads, head_dim = q_THD.shape[1:]
    kv_heads = kv_SW.shape[1] // (2 * head_dim)
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float64, device=q_THD.device)
    for row, (index, position) in enumerate(zip(slices_T.tolist(), positions_T.tolist(), strict=True)):
        keys = np.arange(span.first(position), position + 1)
        slots = tables[index][keys // case.block_tokens].astype(np.int64) * case.block_tokens
        slots += keys % case.block_tokens
        kv_L2ND = kv_SW[torch.from_numpy(slots).to(kv_SW.device)].double().view(-1, 2, kv_heads, head_dim)
        k_LHD, v_LHD = kv_L2ND.repeat_interleave(heads // kv_heads, 2).unbind(1)
        logits_HL = torch.einsum("hd,lhd->hl", q_THD[row].double(), k_LHD) * (case.scale or head_dim**-0.5)
        if case.softcap:
            logits_HL = case.softcap * (logits_HL / case.softcap).tanh()
        if sinks_H is not None:
            logits_HL = torch.cat((logits_HL, sinks_H.double()[:, None]), 1)
        out_THD[row] = torch.einsum("hl,lhd->hd", logits_HL.softmax(-1)[:, : len(keys)], v_LHD)
    return out_THD


SEGMENTS = [PrefixSegment([0, 1, 2, 4], 0, 64), PrefixSegment([1, 4], 64, 96), PrefixSegment([3, 5], 0, 32)]
IN_SPANS = [PrefixSegment(list(range(8)), 0, 512), PrefixSegment([0, 1, 2, 3, 7], 512, 640)]
SIX = Case([1] * 6, [70, 100, 64, 40, 130, 33])

CASES = {
    "one key": Case([1], [0]),
    "one long row, divided": Case([1], [700]),
    "single rows": Case([1] * 5, [3, 64, 100, 15, 16]),
    "a prompt": Case([70], [0]),
    "a prompt behind a long context": Case([40], [300]),
    "prompts and single rows": Case([1, 33, 1, 90, 2], [50, 0, 7, 130, 3]),
    "no groups of heads": Case([1, 20], [40, 0], heads=2),
    "seven heads a KV head": Case([1, 20], [40, 5], heads=14),
    "one KV head": Case([1, 9], [40, 5], heads=16, kv_heads=1),
    "head size 80": Case([1, 20], [90, 5], head_dim=80),
    "blocks of 8": Case([1, 20], [90, 5], block_tokens=8),
    "blocks of 64": Case([1, 20], [90, 5], block_tokens=64),
    "windows": Case([1, 40, 1], [200, 100, 20], spans=(FULL, KeySpan(window=37))),
    "chunks": Case([1, 90, 1, 1], [200, 100, 48, 47], spans=(KeySpan(chunk=48), FULL, KeySpan(chunk=16))),
    "softcap": Case([1, 20], [90, 5], softcap=3.0),
    "another scale": Case([1, 20], [90, 5], scale=0.05),
    "sinks": Case([1, 40, 1], [700, 100, 20], spans=(FULL, KeySpan(window=37)), sinks=True, heads=6),
    "sinks, divided": Case([1, 90], [700, 600], sinks=True, programs=60, head_dim=64),
    "sinks, segments": replace(SIX, segments=SEGMENTS, sinks=True),
    "segments": replace(SIX, segments=SEGMENTS),
    "segments and a prompt": Case(
        [1] * 6 + [30], [*SIX.starts, 50], segments=SEGMENTS, spans=(FULL, KeySpan(window=24))
    ),
    "segments in windows and chunks": Case(
        [1] * 8 + [20],
        [730, 700, 700, 690, 660, 650, 655, 720, 600],
        segments=IN_SPANS,
        spans=(KeySpan(window=500), FULL, KeySpan(window=901), KeySpan(chunk=640)),
    ),
    "few slots": Case([1] * 6 + [60], [*SIX.starts, 500], segments=SEGMENTS, slots=24, programs=40),
    "float16": replace(SIX, segments=SEGMENTS, dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_attends_to_what_it_may_see(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 7))
    chunks = [1 if rng.random() < 0.6 else int(rng.integers(2, 50)) for _ in range(count)]
    starts = rng.integers(0, 200, count).tolist()
    singles = [index for index in range(count) if chunks[index] == 1 and starts[index] >= 32]
    segments = [PrefixSegment(singles, 0, 32)] if len(singles) > 1 else []
    spans = (FULL, KeySpan(chunk=16 * int(rng.integers(1, 8))))
    heads, programs = int(rng.choice([2, 4, 6])), int(rng.integers(1, 60))
    check(Case(chunks, starts, segments, heads=heads, spans=spans, programs=programs), seed)


TRUE = Case([1], [640], heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, slots=4096)
SHARED = [PrefixSegment(list(range(64)), 0, 4096), PrefixSegment(list(range(0, 64, 2)), 4096, 4608)]
TRUE_CASES = {
    "batch 1": TRUE,
    "batch 64": replace(TRUE, chunks=[1] * 64, starts=list(range(500, 564))),
    "uneven rows": replace(TRUE, chunks=[1] * 40, starts=[3 + 61 * row for row in range(39)] + [9000]),
    "uneven rows, window": replace(
        TRUE, chunks=[1] * 40, starts=[9 + 61 * row for row in range(40)], spans=(KeySpan(window=700),)
    ),
    "16k keys": replace(TRUE, chunks=[1] * 2, starts=[16_000, 9_000]),
    "a prompt": replace(TRUE, chunks=[1024], starts=[0]),
    "prompts behind contexts": replace(TRUE, chunks=[300, 1, 64, 1], starts=[3000, 77, 5000, 900]),
    "segments": replace(TRUE, chunks=[1] * 64, starts=list(range(4700, 4764)), segments=SHARED),
    "float16": replace(TRUE, chunks=[100, 1], starts=[50, 600], dtype=torch.float16),
    "fp8": replace(TRUE, chunks=[100, 1], starts=[50, 600], kv_dtype=torch.float8_e4m3fn),
    "head size 64": replace(TRUE, chunks=[100, 1], starts=[50, 600], head_dim=64, heads=14, kv_heads=2),
    "head size 256": replace(TRUE, chunks=[100, 1], starts=[50, 600], head_dim=256, heads=8, kv_heads=4),
    "blocks of 64": replace(TRUE, chunks=[200, 1], starts=[700, 900], block_tokens=64),
    "blocks of 8": replace(TRUE, chunks=[200, 1], starts=[700, 900], block_tokens=8),
    "segments in windows": replace(
        TRUE, chunks=[1] * 64, starts=list(range(4700, 4764)), segments=SHARED,
        spans=(KeySpan(window=3000), KeySpan(chunk=4096), KeySpan(window=1024), FULL),
    ),
    "windows": replace(
        TRUE, chunks=[200, 1], starts=[3000, 6000], spans=(KeySpan(window=4096), FULL, KeySpan(window=512))
    ),
    "chunks": replace(TRUE, chunks=[200, 1, 1], starts=[8100, 8000, 8200], spans=(KeySpan(chunk=8192), FULL)),
    "softcap": replace(TRUE, chunks=[200, 1], starts=[300, 600], softcap=30.0),
    "gemma 2": replace(
        TRUE, chunks=[200, 1], starts=[300, 6000], softcap=50.0, scale=0.0625, heads=16, head_dim=256,
        spans=(KeySpan(window=4096), FULL),
    ),
    "gpt-oss": replace(
        TRUE, chunks=[200, *[1] * 40], starts=[300, *range(100, 140)], heads=64, head_dim=64, sinks=True,
        spans=(KeySpan(window=128), FULL),
    ),
    "sinks": replace(TRUE, chunks=[200, 1, 1], starts=[3000, 6000, 40], sinks=True),
    "sinks, segments": replace(TRUE, chunks=[1] * 64, starts=list(range(4700, 4764)), segments=SHARED, sinks=True),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRUE_CASES)
def test_true_shapes(name: str) -> None:
    check(TRUE_CASES[name])
