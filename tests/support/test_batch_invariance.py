"""tests/support/batch_invariance.py: a test is skipped where bfloat16 is refused, and fails where float32 is."""

import pytest
import torch

from engine.layers import linear_cpu
from engine.layers.linear_cpu import CpuLinear, NotBatchInvariant
from tests.support.batch_invariance import skip_if_bfloat16_varies


@pytest.fixture(autouse=True)
def varying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix library whose results depend on where a row lies, and nothing of ours in its place."""
    monkeypatch.setattr(linear_cpu, "has_tiles", lambda: False)
    monkeypatch.setattr(linear_cpu, "_pack", lambda weight_NK: weight_NK)  # some processors pack float32 alone
    monkeypatch.setattr(linear_cpu, "_multiply", lambda x_TK, *_: x_TK * torch.arange(1, len(x_TK) + 1)[:, None])
    for name in ("min_invariant_rows", "piece_rows"):
        monkeypatch.setattr(linear_cpu, name, getattr(linear_cpu, name).__wrapped__)


@skip_if_bfloat16_varies()
def build(dtype: torch.dtype) -> None:
    CpuLinear(torch.ones(4, 8, dtype=dtype))


def test_a_refusal_of_bfloat16_skips_with_its_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="no row count makes a matmul"):
        build(torch.bfloat16)


def test_a_refusal_of_float32_is_a_failure() -> None:
    with pytest.raises(NotBatchInvariant):
        build(torch.float32)
