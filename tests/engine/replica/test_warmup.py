"""What engine/replica/warmup.py prepares, and what a replica's start then takes over;
tests/gateway/commands/model_tools/test_warm.py starts it."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from engine.bench.geometries import write_folder
from engine.execution import dtype_select, open
from engine.execution.artifacts import CpuArtifact, cpu_artifacts
from engine.models.config import read_decoder_config
from engine.protocol.reports import WarmupReport
from engine.protocol.specs import ModelSpec
from engine.replica.warmup import main, warm_up
from tests.support.batch_invariance import skip_if_bfloat16_varies

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    folder = write_folder("tiny", tmp_path / "model")
    return ModelSpec(name="tiny", folder=str(folder), random_weights=True, kv_bytes=1 << 20, context_tokens=64)


def test_what_is_prepared_is_found(model: ModelSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([msgspec.json.encode(model).decode(), "cpu"]) == 0
    warmed = msgspec.json.decode(capsys.readouterr().out, type=WarmupReport)
    assert (warmed.needed, warmed.found, len(warmed.files)) == (True, False, 1)
    assert Path(warmed.files[0]).parent == Path(model.folder) / ".hearth"
    assert warm_up(model, "cpu", opening=False).found


def test_looking_opens_nothing(model: ModelSpec) -> None:
    warmed = warm_up(model, "cpu", opening=False)
    assert (warmed.needed, warmed.found, warmed.files) == (True, False, [])
    assert not (Path(model.folder) / ".hearth").exists()


def test_a_dtype_that_is_said_leaves_nothing_to_find_out(model: ModelSpec) -> None:
    assert not warm_up(msgspec.structs.replace(model, dtype="float32"), "cpu", opening=True).needed


def test_a_start_takes_over_what_was_found(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(model, "cpu", opening=True)
    monkeypatch.setattr(dtype_select, "measure_fastest_dtype", lambda config: pytest.fail("it measures again"))
    open.open_model(model, "cpu", None, lambda: None)


@skip_if_bfloat16_varies()
def test_a_dtype_that_another_start_chose_is_taken(model: ModelSpec) -> None:
    (file,) = open.model_artifacts(model, "cpu").files  # type: ignore[union-attr]
    for chosen in ("bfloat16", "float32"):
        shutil.rmtree(file.parent, ignore_errors=True)
        cpu_artifacts(model, read_decoder_config(Path(model.folder))).write(
            msgspec.convert({"dtype": chosen}, CpuArtifact)
        )
        opened = open.open_model(model, "cpu", None, lambda: None)
        assert chosen in opened.paged.layout.name


def test_a_folder_that_is_no_model_is_an_error_in_words(model: ModelSpec, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(model.folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Unknown"]}))
    assert main([msgspec.json.encode(model).decode(), "cpu"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "Unknown" in told.err.splitlines()[-1]


def test_a_gpu_that_is_not_there_is_an_error_in_words(model: ModelSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([msgspec.json.encode(model).decode(), "cuda:63", "look"]) == 1
    assert "cuda:63" in capsys.readouterr().err


def test_what_another_model_of_its_sizes_has_left_comes_to_lie_beside_it(
    model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "shared"))
    warm_up(model, "cpu", opening=True)
    another = msgspec.structs.replace(model, folder=str(write_folder("tiny", tmp_path / "another")))
    assert warm_up(another, "cpu", opening=False).found
    assert str(tmp_path / "another" / ".hearth") in warm_up(another, "cpu", opening=True).files[0]
