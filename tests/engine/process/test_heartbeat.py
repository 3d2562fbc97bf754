from pathlib import Path

import pytest

from engine.process.heartbeat import Phase, Pulse


def test_a_new_pulse_is_starting_and_has_no_beats(tmp_path: Path) -> None:
    pulse = Pulse.create(tmp_path / "pulse")
    assert pulse.read() == (Phase.STARTING, 0)


def test_a_reader_sees_what_the_writer_does(tmp_path: Path) -> None:
    writer = Pulse.create(tmp_path / "pulse")
    reader = Pulse.open(tmp_path / "pulse")
    writer.enter(Phase.STEP)
    writer.beat()
    writer.beat()
    assert reader.read() == (Phase.STEP, 3)
    writer.enter(Phase.IDLE)
    assert reader.read() == (Phase.IDLE, 4)


def test_creating_again_resets(tmp_path: Path) -> None:
    first = Pulse.create(tmp_path / "pulse")
    first.enter(Phase.STEP)
    first.close()
    assert Pulse.create(tmp_path / "pulse").read() == (Phase.STARTING, 0)


def test_beats_wrap_without_touching_the_phase(tmp_path: Path) -> None:
    pulse = Pulse.create(tmp_path / "pulse")
    pulse.enter(Phase.STEP)
    pulse._words[0] = (int(Phase.STEP) << 56) | ((1 << 56) - 1)
    pulse.beat()
    assert pulse.read() == (Phase.STEP, 0)


def test_a_missing_or_short_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Pulse.open(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"1")
    with pytest.raises(ValueError, match="mmap"):
        Pulse.open(tmp_path / "short")


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    pulse = Pulse.create(tmp_path / "pulse")
    pulse.close()
    pulse.close()
