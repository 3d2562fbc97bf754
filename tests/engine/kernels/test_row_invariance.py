"""embed, norm, rotary and gated: each against plain torch, at the rows of a bucket and with rows past the step's."""

from dataclasses import replace

import pytest
import torch

from engine.kernels import elementwise, embedding, reference, rms_norm, rope
from engine.kernels.rope import Rotation
from engine.models.config import RopeConfig
from engine.models.rope import rope_tables
from engine.step.layout import EMBEDDING_TOKEN, OFFSET_WORD, Section, unpack_step
from tests.support.bf12_weights import coded, weights
from tests.support.steps import DEVICE, error, poisoned, random, step_of

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TOKENS_AT = OFFSET_WORD + Section.TOKENS
DTYPES = [torch.float32, torch.float16]
TRUE = [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), pytest.param(torch.float16, marks=pytest.mark.gpu)]


def test_embedding_follows_tokens_that_the_flight_before_sampled() -> None:
    step = step_of([3, 1, 1], [0, 5, 9])
    batch = unpack_step(step.cpu().numpy())
    tokens_T = torch.from_numpy(batch.tokens_T.copy()).to(DEVICE)
    start = int(step[TOKENS_AT])
    step[start + 3], step[start + 4] = -1 - 1, -1 - 0
    sampled_R = torch.tensor([7, 9, 0], dtype=torch.int32, device=DEVICE)
    tokens_T[3], tokens_T[4] = 9, 7
    embedding_VH, out_TH = random(50, 24), poisoned(8, 24)
    embedding.embed(step, sampled_R, embedding_VH, random(0, out_TH.shape[1]), out_TH)
    assert torch.equal(out_TH[:5], embedding_VH[tokens_T.long()])
    assert not out_TH[5:].any()


def test_a_row_after_numbers_that_were_not_finite_is_still_computed() -> None:
    step = step_of([1], [3])
    step[int(step[TOKENS_AT])] = -1
    out_TH = poisoned(1, 24)
    embedding.embed(
        step, torch.tensor([-1], dtype=torch.int32, device=DEVICE), random(50, 24), random(0, out_TH.shape[1]), out_TH
    )
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
    start = int(step[TOKENS_AT])
    step[start + 1], step[start + 3], step[start + 4] = tokens - 1, -1 - 1, -1 - 0
    sampled_R = torch.tensor([7, 9, -1], dtype=torch.int32, device=DEVICE)
    tokens_T[1], tokens_T[3], tokens_T[4] = tokens - 1, 9, 7
    found_TH, wanted_TH = poisoned(8, hidden), poisoned(8, hidden)
    embedding.embed(step, sampled_R, coded(table_VH), random(0, found_TH.shape[1]), found_TH)
    embedding.embed(step, sampled_R, table_VH.to(DEVICE).float(), random(0, wanted_TH.shape[1]), wanted_TH)
    assert torch.equal(wanted_TH[:5].cpu(), table_VH[tokens_T.long().cpu()].float())
    assert torch.equal(found_TH, wanted_TH)


@pytest.mark.parametrize("hidden", [128, 2304])
@pytest.mark.parametrize("dtype", [*DTYPES, *TRUE])
def test_a_token_may_name_a_row_of_a_buffer(dtype: torch.dtype, hidden: int) -> None:
    step, table_VH, buffer_EH = step_of([4, 1, 1], [0, 5, 9]), coded_table(50, hidden), random(6, hidden, dtype=dtype)
    tokens_T = unpack_step(step.cpu().numpy()).tokens_T.copy()
    for row, named in ((1, 0), (2, 5), (5, 3)):
        step[int(step[TOKENS_AT]) + row] = EMBEDDING_TOKEN + named
    sampled_R = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    wanted_TH = table_VH[torch.from_numpy(tokens_T).long()].float().to(DEVICE)
    wanted_TH[[1, 2, 5]] = buffer_EH[[0, 5, 3]].float()
    for stored in (table_VH.to(DEVICE).float(), coded(table_VH)):
        found_TH = poisoned(8, hidden)
        embedding.embed(step, sampled_R, stored, buffer_EH, found_TH)
        assert torch.equal(found_TH[:6], wanted_TH)
        assert not found_TH[6:].any()


@pytest.mark.gpu
def test_a_coded_embedding_gives_the_same_rows_at_true_shapes() -> None:
    step, table_VH = step_of([2048, *[1] * 64], [0] * 65, 40000), coded_table(40000, 4096)
    sampled_R = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found_TH, wanted_TH = poisoned(2200, 4096), poisoned(2200, 4096)
    embedding.embed(step, sampled_R, coded(table_VH), random(0, found_TH.shape[1]), found_TH)
    embedding.embed(step, sampled_R, table_VH.to(DEVICE), random(0, wanted_TH.shape[1]), wanted_TH)
    assert torch.equal(found_TH, wanted_TH)


@pytest.mark.parametrize("coding", ["plain", "coded"])
def test_an_embedding_is_scaled(coding: str) -> None:
    step, table_VH = step_of([3, 1, 1], [0, 5, 9]), coded_table(50, 128)
    plain_VH = table_VH.to(DEVICE).float()
    sampled_R, found_TH, wanted_TH = (
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        poisoned(8, 128),
        poisoned(8, 128),
    )
    buffer_EH = random(2, 128, seed=5)
    step[int(step[OFFSET_WORD + Section.TOKENS])] = EMBEDDING_TOKEN + 1
    embedding.embed(step, sampled_R, coded(table_VH) if coding == "coded" else plain_VH, buffer_EH, found_TH, 55.5)
    embedding.embed(step, sampled_R, plain_VH, buffer_EH, wanted_TH)
    assert error(found_TH[1:], wanted_TH[1:] * 55.5) < 1e-7
    assert torch.equal(found_TH[0], buffer_EH[1])


@pytest.mark.parametrize("is_coded", [False, True])
def test_embeddings_of_parts_of_the_vocabulary_add_up_to_those_of_all(is_coded: bool) -> None:
    step, table_VH, buffer_EH = step_of([4, 1, 1], [0, 5, 9], 33000), coded_table(33000, 128), random(2, 128, seed=5)
    start = int(step[OFFSET_WORD + Section.TOKENS])
    step[start], step[start + 1], step[start + 2] = EMBEDDING_TOKEN + 1, 32999, 20000
    sampled_R, wanted_TH = torch.zeros(1, dtype=torch.int32, device=DEVICE), poisoned(8, 128)
    embedding.embed(step, sampled_R, table_VH.to(DEVICE).float(), buffer_EH, wanted_TH)
    parts = []
    for first, last in ((0, 20000), (20000, 33000)):
        own_VH = table_VH[first:last]
        stored = coded(own_VH) if is_coded else own_VH.to(DEVICE).float()
        parts.append(poisoned(8, 128))
        embedding.embed(step, sampled_R, stored, buffer_EH, parts[-1], first=first)
    assert all(int(part_TH[:6].any(1).sum()) < 6 for part_TH in parts)
    assert torch.equal(parts[0] + parts[1], wanted_TH)


def check_add_norm(rows: int, hidden: int, parts: int, dtype: torch.dtype, behind: bool = False) -> None:
    sum_TH, weight_H = random(rows, hidden, seed=1), random(hidden, seed=2)
    part_dtype = torch.float32 if parts > 1 else dtype
    parts_PTH = random(parts, rows, hidden, dtype=part_dtype, seed=3) if parts else None
    behind_H = random(hidden, seed=4) if behind else None
    added_TH = torch.zeros_like(sum_TH) if parts_PTH is None else parts_PTH.float().sum(0)
    if behind_H is not None:
        added_TH = reference.rms_norm(added_TH, behind_H, 1e-5, torch.float32)
    wanted_sum = sum_TH + added_TH
    out_TH = poisoned(rows, hidden, dtype=dtype)
    rms_norm.add_norm(sum_TH, parts_PTH, weight_H, 1e-5, out_TH, behind_H)
    assert error(sum_TH, wanted_sum) < 1e-6
    assert error(out_TH, reference.rms_norm(wanted_sum.double(), weight_H, 1e-5, torch.float64)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden", "parts"), [(1, 64, 0), (3, 80, 1), (5, 48, 4), (2, 320, 8)])
def test_adding_parts_and_norming(rows: int, hidden: int, parts: int, dtype: torch.dtype) -> None:
    check_add_norm(rows, hidden, parts, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden", "parts"), [(3, 80, 1), (5, 48, 4)])
def test_norming_what_is_added(rows: int, hidden: int, parts: int, dtype: torch.dtype) -> None:
    check_add_norm(rows, hidden, parts, dtype, behind=True)


@pytest.mark.parametrize("dtype", TRUE)
@pytest.mark.parametrize(("rows", "hidden", "parts"), [(1, 5376, 8), (64, 3584, 1), (8192, 5376, 1)])
def test_norming_what_is_added_at_true_shapes(rows: int, hidden: int, parts: int, dtype: torch.dtype) -> None:
    check_add_norm(rows, hidden, parts, dtype, behind=True)


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
    normed: bool, kind: Rotation | None = None,
) -> None:  # fmt: skip
    """`kind` lacks its tables, and gets none where positions are counted from 1: what is tempered so does not turn."""
    step = step_of(chunks, starts, groups=2)
    batch = unpack_step(step.cpu().numpy())
    rows, width = len(batch.tokens_T), (heads + 2 * kv_heads) * head_dim
    part_dtype = torch.float32 if parts > 1 else dtype
    parts_PTW = random(parts, rows + 2, width, dtype=part_dtype, seed=1)
    qk_norm = random(heads + kv_heads, head_dim, seed=2) if normed else None
    kind = kind or Rotation(None)
    cos_PD, sin_PD = (table.to(DEVICE) for table in rope_tables(RopeConfig(10000.0), head_dim, kind.period or 4096))
    rotation = kind if kind.unit and kind.ahead else replace(kind, tables=(cos_PD, sin_PD))
    q_THD = poisoned(rows + 2, heads, head_dim, dtype=dtype)
    kv_SW = poisoned((int(batch.tables_GSW[1].max()) + 1) * 16, 2 * kv_heads * head_dim, dtype=dtype)
    rope.rotate_and_write(step, parts_PTW, qk_norm, 1e-6, rotation, q_THD, kv_SW, 1)

    qkv_THD = parts_PTW.float().sum(0)[:rows].view(rows, -1, head_dim)
    qk_THD = qkv_THD[:, : heads + kv_heads]
    if qk_norm is not None:
        qk_THD = reference.rms_norm(qk_THD, qk_norm, 1e-6, dtype).float()
    positions_T = torch.from_numpy(batch.positions_T.copy()).to(DEVICE).long()
    qk_THD = qk_THD.clone()
    if rotation.tables is not None:
        places_T = positions_T % rotation.period if rotation.period else positions_T
        reference.rotate_(qk_THD, cos_PD[places_T, None], sin_PD[places_T, None])
    if rotation.normed:
        qk_THD = reference.rms_norm(qk_THD.to(dtype), None, 1e-6, dtype).float()
    if rotation.unit:
        heat_T = torch.log1p((positions_T + rotation.ahead) // rotation.unit) * rotation.gain + 1
        qk_THD[:, :heads] *= heat_T[:, None, None]
    kv_TW = torch.cat((qk_THD[:, heads:], qkv_THD[:, heads + kv_heads :]), 1).reshape(rows, -1)
    slots_T = torch.from_numpy(batch.slots_GT[1].copy()).to(DEVICE).long()
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        *(Rotation(None, period=16), Rotation(None, period=32, normed=True), Rotation(None, unit=8, gain=0.3)),
        Rotation(None, unit=8, gain=0.3, ahead=0),
    ],
    ids=["by the place in a chunk", "normed behind", "tempered", "turned and tempered"],
)
def test_kinds_of_rotation(kind: Rotation, dtype: torch.dtype) -> None:
    check_rotary([40, 1, 1], [0, 40, 97], 5, 1, 64, 2, dtype, normed=False, kind=kind)


@pytest.mark.parametrize("dtype", TRUE)
@pytest.mark.parametrize(
    "kind", [Rotation(None, period=8192), Rotation(None, period=512, normed=True), Rotation(None, unit=64, gain=0.1)]
)
def test_kinds_of_rotation_at_true_shapes(kind: Rotation, dtype: torch.dtype) -> None:
    check_rotary([512, *[1] * 64], [100] * 65, 40, 8, 128, 1, dtype, normed=False, kind=kind)


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
    rope.rotate_and_write(step, parts, None, 1e-6, Rotation((cos_PD, sin_PD)), q_THD, kv_SW, 0)
    slot = int(unpack_step(step.cpu().numpy()).slots_GT[0, 0])
    assert (kv_SW[slot].float() == 448).all()


def check_gated(rows: int, inner: int, dtype: torch.dtype) -> None:
    x_T2I = random(rows, 2 * inner, dtype=dtype)
    wanted = torch.nn.functional.silu(x_T2I[:, :inner].double()) * x_T2I[:, inner:].double()
    assert error(elementwise.silu_and_multiply(x_T2I), wanted) < TOLERANCE[dtype]
    parts_PT2I = random(3, rows, 2 * inner)
    for parts in (x_T2I[None], parts_PT2I):
        sum_T2I = parts.double().sum(0)
        gelu_TI = torch.nn.functional.gelu(sum_T2I[:, :inner], approximate="tanh") * sum_T2I[:, inner:]
        assert error(elementwise.gelu_and_multiply(parts, dtype), gelu_TI) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [*DTYPES, *TRUE])
def test_logits_are_capped_in_place(dtype: torch.dtype) -> None:
    logits_RV = 100 * random(3, 5000, dtype=dtype)
    wanted_RV = 30 * (logits_RV.double() / 30).tanh()
    assert elementwise.cap_logits(logits_RV, 30.0) is logits_RV
    assert error(logits_RV, wanted_RV) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (5, 40), (3, 2100)])
def test_gating(rows: int, inner: int, dtype: torch.dtype) -> None:
    check_gated(rows, inner, dtype)


@pytest.mark.parametrize("dtype", TRUE)
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_gating_at_true_shapes(rows: int, dtype: torch.dtype) -> None:
    check_gated(rows, 14336, dtype)
