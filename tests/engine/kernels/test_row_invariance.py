"""embed, norm, rotary and gated: each against plain torch, at the rows of a bucket and with rows past the step's."""

import pytest
import torch

from engine.kernels import embedding, reference, rms_norm, rope, swiglu
from engine.models.config import RopeConfig
from engine.models.llama import rope_tables
from engine.step.layout import unpack_step
from tests.support.bf12_weights import coded, weights
from tests.support.steps import DEVICE, error, poisoned, random, step_of

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16]
TRUE = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), pytest.param(torch.float16, marks=pytest.mark.gpu)]


def test_embedding_follows_tokens_that_the_flight_before_sampled() -> None:
    step = step_of([3, 1, 1], [0, 5, 9])
    batch = unpack_step(step.cpu().numpy())
    tokens_T = torch.from_numpy(batch.tokens_T.copy()).to(DEVICE)
    start = int(step[8])
    step[start + 3], step[start + 4] = -1 - 1, -1 - 0
    sampled_R = torch.tensor([7, 9, 0], dtype=torch.int32, device=DEVICE)
    tokens_T[3], tokens_T[4] = 9, 7
    embedding_VH, out_TH = random(50, 24), poisoned(8, 24)
    embedding.embed(step, sampled_R, embedding_VH, out_TH)
    assert torch.equal(out_TH[:5], embedding_VH[tokens_T.long()])
    assert not out_TH[5:].any()


def test_a_row_after_numbers_that_were_not_finite_is_still_computed() -> None:
    step = step_of([1], [3])
    step[int(step[8])] = -1
    out_TH = poisoned(1, 24)
    embedding.embed(step, torch.tensor([-1], dtype=torch.int32, device=DEVICE), random(50, 24), out_TH)
    assert out_TH.isfinite().all()


def coded_table(tokens: int, hidden: int) -> torch.Tensor:
    """Each row with numbers that have no code at its ends."""
    table_VH = weights(tokens, hidden)
    table_VH[:, 0], table_VH[::2, -1] = 0.0, 3e4
    table_VH[9] = 0.0
    return table_VH


@pytest.mark.parametrize(("tokens", "hidden"), [(50, 128), (50, 2304), (33000, 128)])
def test_a_coded_embedding_gives_the_same_rows(tokens: int, hidden: int) -> None:
    step, table_VH = step_of([3, 1, 1], [0, 5, 9], tokens), coded_table(tokens, hidden)
    tokens_T = torch.from_numpy(unpack_step(step.cpu().numpy()).tokens_T.copy()).to(DEVICE)
    start = int(step[8])
    step[start + 1], step[start + 3], step[start + 4] = tokens - 1, -1 - 1, -1 - 0
    sampled_R = torch.tensor([7, 9, -1], dtype=torch.int32, device=DEVICE)
    tokens_T[1], tokens_T[3], tokens_T[4] = tokens - 1, 9, 7
    found_TH, wanted_TH = poisoned(8, hidden), poisoned(8, hidden)
    embedding.embed(step, sampled_R, coded(table_VH), found_TH)
    embedding.embed(step, sampled_R, table_VH.to(DEVICE).float(), wanted_TH)
    assert torch.equal(wanted_TH[:5].cpu(), table_VH[tokens_T.long().cpu()].float())
    assert torch.equal(found_TH, wanted_TH)


@pytest.mark.gpu
def test_a_coded_embedding_gives_the_same_rows_at_true_shapes() -> None:
    step, table_VH = step_of([2048, *[1] * 64], [0] * 65, 40000), coded_table(40000, 4096)
    sampled_R = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found_TH, wanted_TH = poisoned(2200, 4096), poisoned(2200, 4096)
    embedding.embed(step, sampled_R, coded(table_VH), found_TH)
    embedding.embed(step, sampled_R, table_VH.to(DEVICE), wanted_TH)
    assert torch.equal(found_TH, wanted_TH)


def check_add_norm(rows: int, hidden: int, parts: int, dtype: torch.dtype) -> None:
    sum_TH, weight_H = random(rows, hidden, seed=1), random(hidden, seed=2)
    part_dtype = torch.float32 if parts > 1 else dtype
    parts_PTH = random(parts, rows, hidden, dtype=part_dtype, seed=3) if parts else None
    wanted_sum = sum_TH if parts_PTH is None else sum_TH + parts_PTH.float().sum(0)
    out_TH = poisoned(rows, hidden, dtype=dtype)
    rms_norm.add_norm(sum_TH, parts_PTH, weight_H, 1e-5, out_TH)
    assert error(sum_TH, wanted_sum) < 1e-6
    assert error(out_TH, reference.rms_norm(wanted_sum.double(), weight_H, 1e-5, torch.float64)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden", "parts"), [(1, 64, 0), (3, 80, 1), (5, 48, 4), (2, 320, 8)])
def test_adding_parts_and_norming(rows: int, hidden: int, parts: int, dtype: torch.dtype) -> None:
    check_add_norm(rows, hidden, parts, dtype)


@pytest.mark.parametrize("dtype", TRUE)
@pytest.mark.parametrize(("rows", "hidden", "parts"), [(1, 4096, 8), (64, 5120, 1), (8192, 4096, 1), (17, 8192, 2)])
def test_adding_parts_and_norming_at_true_shapes(rows: int, hidden: int, parts: int, dtype: torch.dtype) -> None:
    check_add_norm(rows, hidden, parts, dtype)


@pytest.mark.parametrize(("hidden", "width"), [(48, 32), (1500, 3000), (2048, 1024)])
def test_wanted_rows_are_gathered(hidden: int, width: int) -> None:
    step = step_of([3, 1, 4], [0, 5, 9])
    sum_TH, attended_TW = random(8, hidden), random(8, width, seed=2)
    sum_RH, attended_RW = poisoned(4, hidden), poisoned(4, width)
    rms_norm.gather(step, sum_TH, attended_TW, sum_RH, attended_RW)
    assert torch.equal(sum_RH[:3], sum_TH[[2, 3, 7]])
    assert torch.equal(attended_RW[:3], attended_TW[[2, 3, 7]])
    assert sum_RH[3].isnan().all()
    assert attended_RW[3].isnan().all()


def check_rotary(
    chunks: list[int], starts: list[int], heads: int, kv_heads: int, head_dim: int, parts: int, dtype: torch.dtype,
    normed: bool,
) -> None:  # fmt: skip
    step = step_of(chunks, starts)
    batch = unpack_step(step.cpu().numpy())
    rows, width = len(batch.tokens_T), (heads + 2 * kv_heads) * head_dim
    part_dtype = torch.float32 if parts > 1 else dtype
    parts_PTW = random(parts, rows + 2, width, dtype=part_dtype, seed=1)
    qk_norm = random(heads + kv_heads, head_dim, seed=2) if normed else None
    cos_PD, sin_PD = (table.to(DEVICE) for table in rope_tables(RopeConfig(10000.0), head_dim, 4096))
    q_THD = poisoned(rows + 2, heads, head_dim, dtype=dtype)
    kv_SW = poisoned((int(batch.tables_SW.max()) + 1) * 16, 2 * kv_heads * head_dim, dtype=dtype)
    rope.rotate_and_write(step, parts_PTW, qk_norm, 1e-6, cos_PD, sin_PD, q_THD, kv_SW)

    qkv_THD = parts_PTW.float().sum(0)[:rows].view(rows, -1, head_dim)
    qk_THD = qkv_THD[:, : heads + kv_heads]
    if qk_norm is not None:
        qk_THD = reference.rms_norm(qk_THD, qk_norm, 1e-6, dtype).float()
    positions_T = torch.from_numpy(batch.positions_T.copy()).to(DEVICE).long()
    qk_THD = qk_THD.clone()
    reference.rotate_(qk_THD, cos_PD[positions_T, None], sin_PD[positions_T, None])
    kv_TW = torch.cat((qk_THD[:, heads:], qkv_THD[:, heads + kv_heads :]), 1).reshape(rows, -1)
    slots_T = torch.from_numpy(batch.slots_T.copy()).to(DEVICE).long()
    assert error(q_THD[:rows], qk_THD[:, :heads]) < TOLERANCE[dtype]
    assert error(kv_SW[slots_T], kv_TW) < TOLERANCE[dtype]
    untouched = torch.ones(len(kv_SW), dtype=torch.bool, device=DEVICE)
    untouched[slots_T] = False
    assert kv_SW[untouched].isnan().all()
    assert q_THD[rows:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "parts", "normed"),
    [(4, 2, 16, 1, False), (4, 2, 32, 3, True), (3, 1, 24, 1, True), (14, 2, 64, 2, False), (20, 4, 80, 1, False)],
)
def test_rotation_and_writing(
    heads: int, kv_heads: int, head_dim: int, parts: int, normed: bool, dtype: torch.dtype
) -> None:
    check_rotary([3, 1, 1], [0, 40, 17], heads, kv_heads, head_dim, parts, dtype, normed)


@pytest.mark.parametrize("dtype", TRUE)
@pytest.mark.parametrize(("heads", "normed"), [(32, False), (40, True)])
@pytest.mark.parametrize("chunks", [[1], [512, *[1] * 64], [2048]])
def test_rotation_and_writing_at_true_shapes(chunks: list[int], heads: int, normed: bool, dtype: torch.dtype) -> None:
    check_rotary(chunks, [100] * len(chunks), heads, 8, 128, 1 if sum(chunks) > 16 else 4, dtype, normed)


@pytest.mark.gpu
def test_what_fp8_cannot_hold_saturates() -> None:
    step, kv_SW = step_of([1], [0]), torch.zeros(64, 2 * 2 * 64, device=DEVICE).to(torch.float8_e4m3fn)
    parts = torch.full((1, 1, (4 + 4) * 64), 1e4, device=DEVICE, dtype=torch.bfloat16)
    cos_PD, sin_PD = (table.to(DEVICE) for table in rope_tables(RopeConfig(10000.0), 64, 16))
    q_THD = poisoned(1, 4, 64, dtype=torch.bfloat16)
    rope.rotate_and_write(step, parts, None, 1e-6, cos_PD, sin_PD, q_THD, kv_SW)
    slot = int(unpack_step(step.cpu().numpy()).slots_T[0])
    assert (kv_SW[slot].float() == 448).all()


def check_gated(rows: int, inner: int, dtype: torch.dtype) -> None:
    x_T2I = random(rows, 2 * inner, dtype=dtype)
    wanted = torch.nn.functional.silu(x_T2I[:, :inner].double()) * x_T2I[:, inner:].double()
    assert error(swiglu.silu_and_multiply(x_T2I), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (5, 40), (3, 2100)])
def test_gating(rows: int, inner: int, dtype: torch.dtype) -> None:
    check_gated(rows, inner, dtype)


@pytest.mark.parametrize("dtype", TRUE)
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_gating_at_true_shapes(rows: int, dtype: torch.dtype) -> None:
    check_gated(rows, 14336, dtype)
