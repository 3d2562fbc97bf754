"""engine/host/model_source.py by a clock of the test's own: when it looks, and what it waits for."""

from pathlib import Path

import msgspec
import pytest

from engine.host.model_source import ModelSource
from engine.process.files import fingerprint
from engine.protocol.specs import MachineSpec, ModelSpec, SpecSource
from tests.support.waiting import wait_for


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.json"
    write(path)
    return path


def write(path: Path, *names: str) -> None:
    models = [ModelSpec(name=name, folder="/models") for name in names]
    spec = MachineSpec(name="here", address="unix:/run/here", folder="/run", models=models)
    path.write_bytes(msgspec.json.encode(spec) + b"\n")


def following(path: Path) -> ModelSource:
    return ModelSource(SpecSource(paths=[str(path)], command=["cat", str(path)], seen=fingerprint([str(path)])))


def read(source: ModelSource, now: float) -> list[str]:
    """What the command says, once it has ended."""
    return [model.name for model in wait_for(lambda: source.poll(now))]


def test_a_file_that_changed_is_read_once_it_is_left_alone_for_a_twentieth_of_a_second(asked: Path) -> None:
    source = following(asked)
    assert source.poll(0.0) is None
    write(asked, "first")
    assert source.poll(0.16) is None
    write(asked, "first", "second")
    assert source.poll(0.22) is None
    assert source.poll(0.23) is None, "it was written since the last look but one"
    assert source.poll(0.28) is None
    assert read(source, 0.28) == ["first", "second"]
    source.close()


def test_a_file_that_is_left_alone_is_looked_at_seldom(asked: Path) -> None:
    source, looks = following(asked), 0
    for turn in range(1000):  # a second of an agent's turns
        before = source._look_at
        source.poll(turn / 1000)
        looks += source._look_at != before
    assert looks <= 8
    source.close()


def test_a_command_that_fails_is_tried_again_later_and_what_it_said_is_kept(asked: Path) -> None:
    source = following(asked)
    source.poll(0.0)
    asked.write_text("hearth.toml: line 3: no such setting\n")
    source.poll(1.0)
    source.poll(2.0)
    wait_for(lambda: source.poll(2.0) is None and source.problem)
    assert source.problem == "hearth.toml: line 3: no such setting"
    assert source.poll(20.0) is None
    source.poll(33.0)
    wait_for(lambda: source.poll(33.0) is None and source._process is None)
    write(asked, "mended")
    source.poll(34.0)
    source.poll(35.0)
    assert read(source, 35.0) == ["mended"]
    assert source.problem == ""
    source.close()


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    asked = tmp_path / "asked.json"
    asked.write_text("")
    source = ModelSource(SpecSource(paths=[str(asked)], command=["sleep", "600"]))
    source.poll(0.0)
    source.poll(1.0)
    process = source._process
    assert process is not None
    wait_for(lambda: source.poll(62.0) is None and source.problem)
    assert process.poll() is not None
    source.close()


def test_a_disk_without_room_ends_no_machine(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = following(asked)

    def full() -> None:
        raise OSError("no space left")

    monkeypatch.setattr("engine.host.model_source.tempfile.TemporaryFile", full)
    write(asked, "first")
    assert [source.poll(now) for now in (1.0, 2.0)] == [None, None]
    assert "no space left" in source.problem
    monkeypatch.undo()
    source.poll(40.0)
    assert read(source, 40.0) == ["first"]
    source.close()
