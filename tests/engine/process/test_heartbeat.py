from pathlib import Path

import pytest

from engine.process.heartbeat import Heartbeat, ReplicaPhase


def test_a_new_heartbeat_is_starting_and_has_no_beats(tmp_path: Path) -> None:
    pulse = Heartbeat.create(tmp_path / "pulse")
    assert pulse.read() == (ReplicaPhase.STARTING, 0)


def test_a_reader_sees_what_the_writer_does(tmp_path: Path) -> None:
    writer = Heartbeat.create(tmp_path / "pulse")
    reader = Heartbeat.open(tmp_path / "pulse")
    writer.enter(ReplicaPhase.STEP)
    writer.beat()
    writer.beat()
    assert reader.read() == (ReplicaPhase.STEP, 3)
    writer.enter(ReplicaPhase.IDLE)
    assert reader.read() == (ReplicaPhase.IDLE, 4)


def test_creating_again_resets(tmp_path: Path) -> None:
    first = Heartbeat.create(tmp_path / "pulse")
    first.enter(ReplicaPhase.STEP)
    first.close()
    assert Heartbeat.create(tmp_path / "pulse").read() == (ReplicaPhase.STARTING, 0)


def test_beats_wrap_without_touching_the_phase(tmp_path: Path) -> None:
    pulse = Heartbeat.create(tmp_path / "pulse")
    pulse.enter(ReplicaPhase.STEP)
    pulse._words[0] = (int(ReplicaPhase.STEP) << 56) | ((1 << 56) - 1)
    pulse.beat()
    assert pulse.read() == (ReplicaPhase.STEP, 0)


def test_a_missing_or_short_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Heartbeat.open(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"1")
    with pytest.raises(ValueError, match="mmap"):
        Heartbeat.open(tmp_path / "short")


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    pulse = Heartbeat.create(tmp_path / "pulse")
    pulse.close()
    pulse.close()
