"""benchmarks/engine/fp8.py on a model of a megabyte: each figure is there, and gains and bounds are what they say."""

import json
from pathlib import Path
from typing import cast

import pytest

from benchmarks import record
from benchmarks.engine.fp8 import SMALL, Side, main
from benchmarks.engine.turns import Turns
from engine.bench.geometries import RooflineBound


@pytest.mark.timeout(300)  # three processes that import torch, two of them together
def test_each_figure_has_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    main(["--device", "cpu", "--small", "--folder", str(tmp_path / "model")])
    rows = {row["shape"]: row["value"] for row in json.loads((tmp_path / "results" / "fp8.json").read_text())}
    for count in SMALL.rows:
        gain = rows[f"bf16-decode-{count}"] / rows[f"fp8-decode-{count}"]
        assert rows[f"fp8-decode-{count}-gain"] == pytest.approx(gain, rel=1e-3), "more is faster"
    longest = SMALL.tokens[-1]
    gain = rows[f"bf16-ttft-{longest}"] / rows[f"fp8-ttft-{longest}"]
    assert rows["fp8-prefill-gain"] == pytest.approx(gain, rel=1e-3)


def test_few_rows_are_bound_by_bytes_and_many_by_the_rate_of_8_bits() -> None:
    bound = RooflineBound(weights_bytes=15 * 10**9, head_bytes=10**9, kv_token_bytes=131072, attention_flop=2**19)
    read = 8 * 10**9
    plain = Side(cast(Turns, None), bound, "", bound.weights_bytes, 1.0)
    packed = Side(cast(Turns, None), bound, "", read, 2.0)
    assert plain.step_ms(64, 1000) == pytest.approx(bound.step_ms(64, 1000))
    assert packed.step_ms(1, 0) == pytest.approx(plain.step_ms(1, 0) * 8 / 15)
    assert packed.step_ms(4096, 0) == pytest.approx(plain.step_ms(4096, 0) * (14 / 2 + 1) / 15), (
        "the head stays as it is"
    )
    assert plain.prompt_ms(8192) == pytest.approx(bound.prompt_ms(8192), rel=1e-3)
    assert plain.prompt_ms(8192) / 2 < packed.prompt_ms(8192) < plain.prompt_ms(8192)
