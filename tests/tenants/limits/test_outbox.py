import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenants.limits.outbox import Outbox
from tenants.records.usage import UsageRecord


def record(n: int) -> UsageRecord:
    return UsageRecord("a" * 32, f"request {n}\n", 20_000, n, n, 0, n, "done", "key", "@cf/ä/b", 5, 1.25, 0.5)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    assert outbox.waiting() == []
    outbox.append([record(1), record(2)])
    outbox.append([record(3)])
    (path,) = outbox.waiting()
    assert outbox.read(path) == ([record(1), record(2), record(3)], 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_removed_file_is_gone_and_the_next_append_begins_another(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append([record(1)])
    (path,) = outbox.waiting()
    outbox.remove(path, 0)
    assert outbox.waiting() == []
    outbox.append([record(2)])
    (path,) = outbox.waiting()
    assert outbox.read(path) == ([record(2)], 0)


def test_a_file_of_a_living_process_is_left_alone_and_taken_over_when_it_ends(tmp_path: Path) -> None:
    alive, other = Outbox(tmp_path), Outbox(tmp_path)
    alive.append([record(1)])
    assert other.waiting() == []
    alive.close()
    (path,) = other.waiting()
    assert other.read(path) == ([record(1)], 0)


def test_a_killed_process_leaves_its_lines(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path; from tenants.limits.outbox import Outbox\n"
        "from tenants.records.usage import UsageRecord\n"
        "Outbox(Path(sys.argv[1])).append([UsageRecord('a', 'r', 1, 2, 3, 4, 5, 'done', 'k', 'm', 6, 7.0)])\n"
        "print('written', flush=True); signal.alarm(60); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    outbox = Outbox(tmp_path)
    assert outbox.waiting() == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = outbox.waiting()
    assert [one.request_id for one in outbox.read(path)[0]] == ["r"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_line_that_a_crash_cut_off_is_counted_and_the_others_are_read(tmp_path: Path, cut: int) -> None:
    outbox = Outbox(tmp_path)
    outbox.append([record(1), record(2)])
    (path,) = outbox.waiting()
    os.truncate(path, path.stat().st_size - 1 - cut)
    assert outbox.read(path) == ([record(1)], 1)


def test_a_file_with_damaged_lines_is_kept_for_people(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append([record(1), record(2)])
    (path,) = outbox.waiting()
    path.write_bytes(path.read_bytes().replace(b"request 1", b"request 9"))
    records, damaged = outbox.read(path)
    assert (records, damaged) == ([record(2)], 1)
    outbox.remove(path, damaged)
    assert outbox.waiting() == []
    assert [left.suffix for left in tmp_path.iterdir()] == [".damaged"]


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Writes beyond `size` fail as on a full disk, after a part of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_the_next_append_is_whole(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append([record(1)])
    (path,) = outbox.waiting()
    with files_at_most(path.stat().st_size + 20), pytest.raises(OSError, match="File too large"):
        outbox.append([record(2)])
    outbox.append([record(2)])
    assert outbox.read(path) == ([record(1), record(2)], 1)


def test_appended_lines_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    outbox = Outbox(tmp_path)
    outbox.append([record(1)])
    (path,) = outbox.waiting()
    assert synced == [path.stat().st_size], "not every byte was written before the fsync"


def test_it_is_closed_behind_an_append_that_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for the append in its thread was cancelled, and closes: the thread must not lose its file."""
    outbox, synced = Outbox(tmp_path), list[int]()
    closing = threading.Thread(target=outbox.close)

    def close_meanwhile(descriptor: int) -> None:
        closing.start()
        closing.join(0.2)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", close_meanwhile)
    outbox.append([record(1)])
    closing.join()
    (path,) = Outbox(tmp_path).waiting()
    assert synced == [path.stat().st_size]
