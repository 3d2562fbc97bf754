"""benchmarks/engine/host_kv.py on a model of a megabyte: prompts come back, and each figure is there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.engine import host_kv


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path / "kv_host.json"


def test_each_figure_has_its_row(results: Path) -> None:
    host_kv.main(["--device", "cpu", "--small"])
    rows = {row["shape"]: row["value"] for row in json.loads(results.read_text())}
    assert set(rows) == {"kv-host-computed", "kv-host-ttft-8k", "kv-host-8k", "kv-host-8k rate", "kv-host-beside"}
    assert all(value > 0 for value in rows.values())


def test_prompts_that_the_pool_holds_itself_are_no_measurement(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kv, "SMALL", replace(host_kv.SMALL, prompts=2))
    with pytest.raises(RuntimeError, match="0 of them in host memory"):
        host_kv.main(["--device", "cpu", "--small"])
    assert not results.exists()
