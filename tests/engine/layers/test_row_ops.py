"""engine/layers/row_ops.py: the compiled functions compute what plain torch does, and each row by itself."""

import pytest
import torch

from engine.kernels import reference
from engine.layers import row_ops
from tests.support.processors import PROCESSORS, compute_as

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_as(request.param, monkeypatch)


@pytest.mark.parametrize("width", [64, 576, 1000])
@pytest.mark.parametrize("added", [None, torch.float32, BF16])
def test_sums_are_added_and_normed_row_by_row(width: int, added: torch.dtype | None) -> None:
    sums, weight = torch.randn(40, width), torch.rand(width)
    more = None if added is None else torch.randn(40, width).to(added)
    expected = sums if more is None else sums + more.float()
    rows = [
        row_ops.add_norm(sums[i : i + 1].clone(), None if more is None else more[i : i + 1], weight, 1e-5, BF16)
        for i in range(40)
    ]
    whole = row_ops.add_norm(sums, more, weight, 1e-5, BF16)
    assert torch.equal(sums, expected)
    assert torch.equal(torch.cat(rows), whole)
    torch.testing.assert_close(whole, reference.rms_norm(expected, weight, 1e-5, BF16), rtol=1e-2, atol=0)


@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_rotated_and_written_as_by_torch(normed: bool) -> None:
    heads, kv_heads, size, rows = 4, 2, 64, 7
    x = torch.randn(rows, (heads + 2 * kv_heads) * size).to(BF16)
    norm = torch.rand(heads + kv_heads, size) if normed else None
    turns = torch.randn(rows, 1, size), torch.randn(rows, 1, size)
    slots = torch.randperm(20)[:rows]
    cache = torch.zeros(20, 2 * kv_heads * size, dtype=BF16)
    expected = x.clone()
    some = expected.view(rows, -1, size)[:, : heads + kv_heads]
    if norm is not None:
        some.copy_(reference.rms_norm(some, norm, 1e-6, BF16))
    reference.rotate_(some, *turns)
    row_ops.rotate_and_write(x, norm, turns, slots, cache, (heads, kv_heads, size), 1e-6)
    torch.testing.assert_close(x, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(cache[slots], x[:, heads * size :])
    assert int((cache != 0).any(1).sum()) == rows


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_gates_are_silus_to_the_last_bit_but_one(rows: int) -> None:
    x = (torch.randn(rows, 2 * 200) * 8).to(BF16)
    x[0, :4] = torch.tensor([0.0, -100.0, 100.0, -1e-3]).to(BF16)
    gated = row_ops.silu_and_multiply(x)
    assert torch.equal(gated[-1:], row_ops.silu_and_multiply(x[-1:]))
    torch.testing.assert_close(gated, reference.silu_and_multiply(x.clone()), rtol=1e-2, atol=1e-30)


def test_what_is_far_below_0_is_let_through_nowhere() -> None:
    gates = torch.tensor([-3e38, -1000.0, -89.0, -86.0, 3e38, float("inf"), float("nan"), 0.0]).to(BF16)
    gated = row_ops.silu_and_multiply(torch.cat((gates, torch.ones(8, dtype=BF16)))[None])[0]
    wanted = torch.tensor([0.0, 0.0, 0.0, 0.0, 3e38, float("inf"), float("nan"), 0.0]).to(BF16)
    torch.testing.assert_close(gated, wanted, rtol=1e-2, atol=1e-30, equal_nan=True)


def test_blocks_are_copied_and_what_nobody_wrote_is_cleared() -> None:
    cache = torch.randn(6 * 16, 32).to(BF16)
    cache[5 * 16 + 9] = float("nan")
    into = torch.empty(2 * 16, 32, dtype=BF16)
    unwritten = torch.arange(16 + 9, 32)
    assert row_ops.read_blocks(cache, torch.tensor([2, 5]), unwritten, into)
    expected = torch.cat((cache[32:48], cache[80:96]))
    expected[unwritten] = 0
    assert torch.equal(into, expected)
