"""gateway/catalogue/checksums.py: sums as coreutils writes them, and files that are not what they say."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.catalogue.checksums import SUMS_NAME, ChecksumError, read_sums, require_sums, write_sums

NAMES = ("model.safetensors", "1_Pooling/config.json", "a name with  spaces", "back\\slash", "two\nlines", "größe")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes([number]) * number * 3_000_000)
    return tmp_path


@pytest.mark.parametrize("words", [[], ["--binary"]])
def test_what_sha256sum_wrote_is_read(folder: Path, words: list[str]) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("no coreutils here")
    written = subprocess.run(["sha256sum", *words, *NAMES[:-1], "./größe"], cwd=folder, capture_output=True, check=True)
    (folder / SUMS_NAME).write_bytes(written.stdout + b"\n")
    sums = read_sums(folder)
    assert set(sums) == set(NAMES)
    require_sums(folder, sums)


def test_what_is_written_sha256sum_checks(folder: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("no coreutils here")
    asked = subprocess.run(["sha256sum", NAMES[0]], cwd=folder, capture_output=True, text=True, check=True)
    write_sums(folder, {NAMES[0]: asked.stdout[:64]})
    subprocess.run(["sha256sum", "--check", "--strict", SUMS_NAME], cwd=folder, check=True, capture_output=True)


def test_sums_that_are_written_again_over_older_ones_are_as_good(tmp_path: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("no coreutils here")
    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):
        subprocess.run(["bash", "-c", f"sha256sum * > {SUMS_NAME}"], cwd=tmp_path, check=True)
        sums = read_sums(tmp_path)
        assert list(sums) == ["config.json"]
        require_sums(tmp_path, sums)


def test_a_folder_without_sums_has_none(tmp_path: Path) -> None:
    assert read_sums(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "said"), [(NAMES[0], "is damaged"), ("gone", "cannot be read"), ("1_Pooling", "cannot be read")]
)
def test_another_content_a_missing_file_and_a_folder_are_named(folder: Path, name: str, said: str) -> None:
    with pytest.raises(ChecksumError, match=f"{name}.* {said}"):
        require_sums(folder, {name: "0" * 64})


@pytest.mark.parametrize(
    "line", ["abc  x", "0" * 64, "0" * 64 + " x", "0" * 64 + "  /etc/passwd", "0" * 64 + "  a/../../x"]
)
def test_lines_that_are_none_or_leave_the_folder_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / SUMS_NAME).write_text(f"{'0' * 64}  good\n{line}\n")
    with pytest.raises(ChecksumError, match="line 2"):
        read_sums(tmp_path)


def test_sums_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / SUMS_NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(ChecksumError, match="cannot be read"):
        read_sums(tmp_path)
