import json
import math
import os
from pathlib import Path

import msgspec
import pytest

from engine.execution.artifacts import ArtifactFiles, ArtifactKey, digest_files
from engine.step.cost_model import CostModel

KEY: ArtifactKey = {"device": "NVIDIA H200", "driver": "580.65", "blocks": 64}
COSTS = CostModel(((1, 1.5), (16, 2.5)), 0.1, 0.2, math.inf, 0.3, 0.0, 1.0)


class Sized(msgspec.Struct, frozen=True):
    bytes: int
    costs: CostModel = COSTS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_written_is_read_by_the_next(tmp_path: Path) -> None:
    assert ArtifactFiles(tmp_path / "model", KEY, Sized).read() is None
    ArtifactFiles(tmp_path / "model", KEY, Sized).write(Sized(7))
    assert ArtifactFiles(tmp_path / "model", dict(sorted(KEY.items())), Sized).read() == Sized(7)


@pytest.mark.parametrize("changed", [{"driver": "590.1"}, {"blocks": 65}, {"more": None}])
def test_another_key_finds_nothing(tmp_path: Path, changed: ArtifactKey) -> None:
    ArtifactFiles(tmp_path / "model", KEY, Sized).write(Sized(7))
    assert ArtifactFiles(tmp_path / "model", {**KEY, **changed}, Sized).read() is None


def test_a_file_under_the_name_of_another_key_is_not_trusted(tmp_path: Path) -> None:
    written = ArtifactFiles(tmp_path / "model", KEY, Sized).write(Sized(7))
    another = ArtifactFiles(tmp_path / "model", {**KEY, "driver": "590.1"}, Sized)
    for source, target in zip(written, another.files, strict=True):
        os.rename(source, target)
    assert another.read() is None


WRONG = json.dumps({"key": KEY, "found": {"bytes": "x"}}).encode()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"\xff"', b'{"found": {}}', WRONG])
def test_an_odd_file_is_as_none(tmp_path: Path, content: bytes) -> None:
    artefacts = ArtifactFiles(tmp_path / "model", KEY, Sized)
    for file in artefacts.write(Sized(7)):
        file.write_bytes(content)
    assert artefacts.read() is None
    artefacts.write(Sized(8))
    assert artefacts.read() == Sized(8)


def test_a_model_of_the_same_sizes_finds_what_another_has_measured(tmp_path: Path) -> None:
    ArtifactFiles(tmp_path / "model", KEY, Sized).write(Sized(7))
    assert ArtifactFiles(tmp_path / "another", KEY, Sized).read() == Sized(7)


def test_a_model_takes_what_was_measured_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ArtifactFiles(tmp_path / "model", KEY, Sized).write(Sized(7))
    monkeypatch.delenv("TRITON_CACHE_DIR")
    os.rename(tmp_path / "model", tmp_path / "moved")
    assert ArtifactFiles(tmp_path / "moved", KEY, Sized).read() == Sized(7)


def test_a_folder_that_cannot_be_written_leaves_the_shared_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    artefacts = ArtifactFiles(tmp_path / "file", KEY, Sized)
    assert artefacts.write(Sized(7)) == artefacts.files[1:]
    assert artefacts.read() == Sized(7)


def test_nowhere_to_write_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "file").touch()
    assert ArtifactFiles(tmp_path / "file", KEY, Sized).write(Sized(7)) == []


def test_the_oldest_keys_are_forgotten(tmp_path: Path) -> None:
    for driver in range(20):
        for file in ArtifactFiles(tmp_path / "model", {"driver": driver}, Sized).write(Sized(driver)):
            os.utime(file, (driver, driver))
    left = [driver for driver in range(20) if ArtifactFiles(tmp_path / "model", {"driver": driver}, Sized).read()]
    assert left == list(range(4, 20))
    assert len(os.listdir(tmp_path / "model" / ".hearth")) == 16


def test_a_digest_tells_names_and_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    assert digest_files([one, two]) == digest_files([two, one])
    before = digest_files([one])
    one.write_text("3")
    assert digest_files([one]) != before
