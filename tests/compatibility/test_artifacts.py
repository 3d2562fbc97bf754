"""What an earlier version measured for a model is another key's today: a start measures anew and keeps both."""

import json
import math
import shutil
from pathlib import Path

import pytest

from engine.execution.artifacts import ArtifactFiles, CpuArtifact, GpuArtifact, cpu_artifacts, gpu_artifacts
from engine.models.config import read_decoder_config
from engine.protocol.specs import ModelSpec
from engine.step.cost_model import CostModel
from tests.compatibility.conftest import FILES

BUILT_IN = Path(__file__).parents[2] / "engine" / "builtin_model"
COSTS = CostModel(((1, 1.5), (16, 2.5)), 0.1, 0.2, math.inf, 0.3, 0.0, 1.0)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """A model's folder with the files of the earlier version."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    shutil.copytree(FILES / "artifacts", tmp_path / ".hearth")
    return ModelSpec(name="@cf/hearth/ember", folder=str(tmp_path))


def of_gpu(model: ModelSpec) -> ArtifactFiles[GpuArtifact]:
    return gpu_artifacts(model, read_decoder_config(BUILT_IN), 512, "bfloat16", ["a"], "NVIDIA H200")


def of_cpu(model: ModelSpec) -> ArtifactFiles[CpuArtifact]:
    return cpu_artifacts(model, read_decoder_config(BUILT_IN))


def test_files_of_other_sources_are_left_alone_and_measured_anew(model: ModelSpec) -> None:
    old = sorted((Path(model.folder) / ".hearth").glob("*.json"))
    assert of_gpu(model).read() is None
    assert of_cpu(model).read() is None
    of_cpu(model).write(CpuArtifact("bfloat16"))
    assert of_cpu(model).read() == CpuArtifact("bfloat16")
    assert all(file.exists() for file in old)


def test_a_file_of_an_earlier_version_under_todays_name_is_refused(model: ModelSpec) -> None:
    for old in sorted((Path(model.folder) / ".hearth").glob("*.json")):
        for artifacts in (of_gpu(model), of_cpu(model)):
            shutil.copy(old, artifacts.files[0])
            assert artifacts.read() is None


def test_what_was_measured_is_read_as_it_was_or_not_at_all(model: ModelSpec) -> None:
    """With today's key, the fields of an earlier version either have their meaning or are refused."""
    documents = [json.loads(file.read_text()) for file in (Path(model.folder) / ".hearth").glob("*.json")]
    by_kind = {"device" in document["key"]: document for document in documents}
    for artifacts, document, artifact in (
        (of_gpu(model), by_kind[True], GpuArtifact([1024, 2048], 64, COSTS)),
        (of_cpu(model), by_kind[False], CpuArtifact("float32")),
    ):
        artifacts.write(artifact)  # type: ignore[arg-type]  # each one its own kind
        key = json.loads(artifacts.files[0].read_text())["key"]
        artifacts.files[0].write_text(json.dumps({**document, "key": key}))
        assert artifacts.read() in (artifact, None)
