"""engine/compression/target.py: a folder appears whole or not at all, whatever ends its making; so does the next."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bf12.metadata import CompressionLevel
from engine.compression.compress import compress_folder
from engine.compression.expand import expand_folder
from engine.compression.source import scan_folder
from engine.compression.target import PARTIAL_SUFFIX, TargetError, atomic_folder, list_files
from tests.engine.bf12.test_codec import gaussian
from tests.support.compressed_folders import write_folder
from tests.support.waiting import wait_for

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", {"weight": gaussian(1500, 1024), "bias": gaussian(1, 100)[0]})


def make(folder: Path) -> Path:
    compress_folder(scan_folder(folder), folder.with_name("made"), CompressionLevel.DISTRIBUTION, CPU)
    return folder.with_name("made")


def around(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


class FullDisk:
    """Fails the call of this index among all that need room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
        self.calls = 0
        self._fails = fails
        for name in ("pwrite", "fsync", "rename"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self._fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments, **named)

        return counted


@pytest.mark.parametrize("what", ["compress", "expand"])
def test_a_disk_that_fills_at_any_moment_leaves_nothing(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(folder)
    work = (lambda: expand_folder(made, folder.with_name("back"), CPU)) if what == "expand" else lambda: make(folder)
    new = folder.with_name("back" if what == "expand" else "made")
    if what == "compress":
        shutil.rmtree(made)
    before = around(folder)
    with monkeypatch.context() as patched:
        disk = FullDisk(patched, -1)
        work()
    shutil.rmtree(new)
    assert disk.calls >= 8
    for fails in range(1, disk.calls):  # the last is after the rename: the folder is there by then
        with monkeypatch.context() as patched:
            FullDisk(patched, fails)
            with pytest.raises(TargetError, match="cannot be written: No space left"):
                work()
        assert around(folder) == before, fails
    work()
    assert around(folder) == sorted([*before, new.name])


def test_a_limit_on_files_is_a_full_disk(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(TargetError, match="too large"):
            make(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert around(folder) == ["model"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_real_disk_that_is_full_is_said_before_and_left_clean(folder: Path, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(3 << 20))
    with pytest.raises(TargetError, match=r"needs 2\.\d+ MiB, and .*disk has 1\.00 MiB free"):
        compress_folder(scan_folder(folder), small_disk / "made", CompressionLevel.DEVICE, CPU)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("engine.compression.compress.require_disk_space", lambda *_: None)
        with pytest.raises(TargetError, match="cannot be written: No space left"):
            compress_folder(scan_folder(folder), small_disk / "made", CompressionLevel.DEVICE, CPU)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_a_killed_process_leaves_what_no_one_takes_for_a_model_and_the_next_goes_on(folder: Path) -> None:
    partial, made = folder.with_name(f"made{PARTIAL_SUFFIX}"), folder.with_name("made")
    dice, left = random.Random(7), 0
    for turn in range(8):
        child = os.fork()
        if child == 0:
            make(folder)
            os._exit(0)
        wait_for(lambda: partial.exists() or made.exists())
        time.sleep(dice.uniform(0.0, 0.01 * turn))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += partial.exists()
        assert not (partial / "config.json").exists() or made.exists() or _whole(partial, folder)
        if made.exists():
            expand_folder(made, folder.with_name("back"), CPU)
            shutil.rmtree(folder.with_name("back"))
            shutil.rmtree(made)
    assert left > 0
    make(folder)
    assert around(folder) == ["made", "model"]


def test_what_makes_a_folder_a_model_is_removed_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, removed = folder.with_name(f"made{PARTIAL_SUFFIX}"), list[str]()
    shutil.copytree(folder, partial)
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    make(folder)
    assert removed[0] == "config.json"
    assert len(removed) > 1
    assert around(folder) == ["made", "model"]


def _whole(partial: Path, folder: Path) -> bool:
    """config.json comes last: all else is there by then."""
    return list_files(partial) == list_files(folder)


def test_a_process_that_is_told_to_end_takes_back_what_it_began(folder: Path) -> None:
    code = _ENDED.format(folder=str(folder), target=str(folder.with_name("made")))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "copying\n" in iter(process.stdout.readline, "")  # it has begun: a folder alone may be another one's
    assert folder.with_name(f"made{PARTIAL_SUFFIX}").exists()
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "hearth: stopped\n")
    assert around(folder) == ["model"]


_ENDED = """
import sys, time
from engine.compression import compress
compress.copy_file = lambda *arguments: (print("copying"), sys.stdout.flush(), time.sleep(60))
sys.argv = ["compress", {folder!r}, {target!r}]
sys.exit(compress.main())
"""


def test_one_writes_a_folder_at_a_time(tmp_path: Path) -> None:
    with (
        atomic_folder(tmp_path / "made") as partial,
        pytest.raises(TargetError, match="another process writes"),
        atomic_folder(tmp_path / "made"),
    ):
        raise AssertionError("both write it")
    assert not partial.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_a_killed_one_left_is_replaced(tmp_path: Path) -> None:
    partial = tmp_path / f"made{PARTIAL_SUFFIX}"
    (partial / "below").mkdir(parents=True)
    (partial / "below" / "old").write_text("of yesterday")
    (partial / "config.json").symlink_to(tmp_path)
    with atomic_folder(tmp_path / "made") as made:
        assert list(made.iterdir()) == []
        (made / "new").write_text("of today")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["new"]


def test_what_exists_is_never_replaced(tmp_path: Path, folder: Path) -> None:
    for exists in (folder, folder / "config.json"):
        with pytest.raises(TargetError, match="exists: name a folder that does not"):
            compress_folder(scan_folder(folder), exists, CompressionLevel.DEVICE, CPU)
    with pytest.raises(TargetError, match="there is no folder"):
        compress_folder(scan_folder(folder), tmp_path / "no" / "made", CompressionLevel.DEVICE, CPU)
    with pytest.raises(TargetError, match="name a folder elsewhere"):
        compress_folder(scan_folder(folder), folder / "made", CompressionLevel.DEVICE, CPU)
    with pytest.raises(TargetError, match="exists"), atomic_folder(tmp_path / "late"):
        (tmp_path / "late").mkdir()
    assert around(folder) == ["late", "model"]


def test_what_makes_a_folder_a_model_comes_last(folder: Path) -> None:
    (folder / "zeal").mkdir()
    (folder / "zeal" / "config.json").write_text("{}")
    assert list_files(folder) == [Path("model.safetensors"), Path("zeal/config.json"), Path("config.json")]


def test_what_is_no_file_and_links_that_lead_back_are_told(folder: Path) -> None:
    for place, said in ((folder, "leads back"), (Path("gone"), "no file"), (Path("/dev/zero"), "no file")):
        (folder / "link").symlink_to(place)
        with pytest.raises(TargetError, match=said):
            list_files(folder)
        (folder / "link").unlink()
