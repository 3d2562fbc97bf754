"""What a start finds of an earlier one, and what makes it begin anew."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.bench.geometries import GEOMETRIES, write_folder
from engine.execution import artifacts
from engine.execution.artifacts import ArtifactFiles, CpuArtifact, GpuArtifact, cpu_artifacts, gpu_artifacts
from engine.layers.cpu_row import RowFunctions, TileFunctions
from engine.models.config import ModelConfig, read_decoder_config
from engine.protocol.specs import ModelSpec
from engine.step.cost_model import CostModel

MEASURED = GpuArtifact([7, 8], 9, CostModel(((1, 1.5),), 0.1, 0.2, math.inf, 0.3, 0.0, 1.0))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder("tiny", tmp_path / "model")


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec(name="m", folder=str(folder))


def kept(
    folder: Path, dtype: str = "bfloat16", device: str = "H200", tokens: int = 4096, config: ModelConfig | None = None,
    coded: tuple[str, ...] = (), **settings: Any,
) -> ArtifactFiles[GpuArtifact]:  # fmt: skip
    model = ModelSpec(**{"name": "m", "folder": str(folder), **settings})
    return gpu_artifacts(model, config or read_decoder_config(folder), tokens, dtype, coded, device)


def test_a_later_start_finds_what_was_measured(folder: Path) -> None:
    kept(folder).write(MEASURED)
    assert kept(folder).read() == MEASURED
    assert kept(folder, name="another name", waiting=5, priority=3.0).read() == MEASURED


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "B200"},
        {"dtype": "float16"},
        {"tokens": 2048},
        {"kv_dtype": "fp8"},
        {"sequences": 64},
        {"step_tokens": 512},
        {"block_tokens": 32},
        {"coded": ("head.weight",)},
    ],
)
def test_it_is_not_found_for_other_sizes(folder: Path, changes: dict[str, Any]) -> None:
    kept(folder).write(MEASURED)
    assert kept(folder, **changes).read() is None


def test_it_is_not_found_for_another_model_in_its_place(folder: Path) -> None:
    kept(folder).write(MEASURED)
    assert kept(folder, config=replace(read_decoder_config(folder), layers=3)).read() is None


def test_a_cpu_has_a_dtype_and_no_other(folder: Path) -> None:
    chosen = cpu_artifacts(spec_of(folder), read_decoder_config(folder))
    (file,) = chosen.write(CpuArtifact("bfloat16"))
    assert chosen.read() == CpuArtifact("bfloat16")
    file.write_text(file.read_text().replace("bfloat16", "int3"))
    assert chosen.read() is None
    document = json.loads(file.read_text())
    assert document["key"]["processor"]


def test_a_cpus_dtype_is_measured_anew_with_a_compiler_and_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AVX2 there is no bfloat16 without one: what was measured with it opened no model."""
    monkeypatch.setattr(artifacts, "row_functions", lambda: None)
    without = cpu_artifacts(spec_of(folder), read_decoder_config(folder))
    made = RowFunctions(*[print] * 6)
    monkeypatch.setattr(artifacts, "row_functions", lambda: made)
    with_compiler = cpu_artifacts(spec_of(folder), read_decoder_config(folder))
    with_compiler.write(CpuArtifact("bfloat16"))
    assert without.read() is None
    monkeypatch.setattr(artifacts, "row_functions", lambda: made._replace(tiles=TileFunctions(print, print)))
    assert cpu_artifacts(spec_of(folder), read_decoder_config(folder)).read() is None
    monkeypatch.setattr(artifacts, "row_functions", lambda: made)
    assert cpu_artifacts(spec_of(folder), read_decoder_config(folder)).read() == CpuArtifact("bfloat16")


def test_the_geometries_differ_in_their_keys(tmp_path: Path) -> None:
    files = set()
    for name in GEOMETRIES:
        folder = write_folder(name, tmp_path / name)
        files |= {file.name for file in cpu_artifacts(spec_of(folder), read_decoder_config(folder)).files}
    assert len(files) == len(GEOMETRIES)
