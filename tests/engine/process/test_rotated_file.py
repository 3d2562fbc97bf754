"""Files of lines that several processes write and move aside."""

import subprocess
import sys
from pathlib import Path

from engine.process.rotated_file import RotatedFile, log_files

WRITER = """
import sys
from pathlib import Path
from engine.process.rotated_file import RotatedFile
file = RotatedFile(Path(sys.argv[1]), 20_000, 40)
for number in range(2_000):
    file.write(f"{sys.argv[2]} {number} {'x' * 40}".encode())
"""


def test_the_newest_lines_stay_and_the_oldest_files_go(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    file = RotatedFile(path, 100, 2)
    for number in range(60):
        file.write(f"line {number:04}".encode())
    files = log_files(path, 2)
    assert [each.name for each in files] == ["a.log.2", "a.log.1", "a.log"]
    lines = "".join(each.read_text() for each in files).splitlines()
    assert lines == [f"line {number:04}" for number in range(60 - len(lines), 60)]
    assert all(each.stat().st_size <= 110 for each in files)
    assert path.stat().st_mode & 0o077 == 0


def test_without_files_aside_a_long_one_begins_anew(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "a.log", 50, 0)
    for number in range(20):
        file.write(f"line {number:04}".encode())
    assert [each.name for each in tmp_path.glob("a.log*") if each.suffix != ".lock"] == ["a.log"]
    assert (tmp_path / "a.log").read_text().splitlines()[-1] == "line 0019"


def test_several_processes_lose_no_line_and_mix_none(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = "".join(each.read_text() for each in log_files(path, 40)).splitlines()
    for name in "abc":
        numbers = [int(line.split()[1]) for line in lines if line.startswith(f"{name} ")]
        assert numbers == list(range(2_000)), name
    assert {len(line) for line in lines} <= {len(f"a {number} ") + 40 for number in (1, 10, 100, 1_000)}


def test_a_file_that_logrotate_moved_or_removed_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    file = RotatedFile(path, 1_000, 2)
    file.write(b"one")
    path.rename(tmp_path / "moved")
    file.write(b"two")
    assert ((tmp_path / "moved").read_text(), path.read_text()) == ("one\n", "two\n")
    path.unlink()
    file.write(b"three")
    assert path.read_text() == "three\n"


def test_a_folder_that_is_not_there_loses_lines_and_ends_nobody(tmp_path: Path) -> None:
    RotatedFile(tmp_path / "missing" / "a.log", 1_000, 2).write(b"one")
    assert list(tmp_path.iterdir()) == []
