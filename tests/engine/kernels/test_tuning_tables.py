"""engine/kernels/tuning_tables.py: only a measured loss in the mean keeps a weight in bf16; it is read where no torch
is."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kernels import tuning, tuning_tables
from engine.kernels.fp8.tuning import kernel_of
from engine.kernels.tuning_tables import bf12_pays_off


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuning_tables, "_TABLES", tmp_path)
    tuning_tables.load_table.cache_clear()
    yield tmp_path
    tuning_tables.load_table.cache_clear()


def test_what_nobody_measured_pays(tables: Path) -> None:
    assert bf12_pays_off(4096, 4096, False)


@pytest.mark.parametrize(
    ("ratios", "pays"),
    [
        ({"1": 0.84, "8": 0.8, "16": 0.87, "32": 0.92, "64": 1.1}, True),
        ({"1": 0.9, "64": 1.12}, False),
        ({"1": 0.76, "128": 1.5}, True),
        ({"1": 1.2}, False),
    ],
)
def test_a_shape_that_is_slower_in_the_mean_of_few_rows_does_not_pay(
    tables: Path, ratios: dict[str, float], pays: bool
) -> None:
    (tables / "a.json").write_text(json.dumps({"4096x4096 bf12 / bf16": {"1": 0.8}}))
    (tables / "b.json").write_text(json.dumps({"4096x4096 bf12 / bf16": ratios, "64x128 gated bf12 / bf16": {"1": 9}}))
    assert bf12_pays_off(4096, 4096, False) == pays
    assert bf12_pays_off(4096, 4096, True)
    assert not bf12_pays_off(64, 128, True)


def test_it_needs_no_torch() -> None:
    program = "import sys, engine.kernels.tuning_tables; print({'torch', 'triton'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert told.strip() == "set()"


def test_the_tables_here_are_as_they_are_read() -> None:
    for path in tuning_tables._TABLES.glob("*.json"):
        for key, row in tuning_tables.load_table(path.stem).items():
            assert all(int(bucket) > 0 for bucket in row)
            if key.endswith(" / bf16"):
                assert all(isinstance(ratio, float) and 0 < ratio < 10 for ratio in row.values())
            elif key.endswith(" fp8"):
                assert all(kernel_of(entry) for entry in row.values())
            else:
                found = [tiling for tiling in row.values() if tiling is not None]
                assert all(tuning.BF12_KERNELS[tiling[0]](*tiling[1:]) for tiling in found if key.endswith(" bf12"))
                assert {len(tiling) for tiling in found if not key.endswith(" bf12")} <= {5}
