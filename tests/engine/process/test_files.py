"""engine/process/files.py: a file is replaced whole or stays as it was."""

import os
from pathlib import Path

import pytest

from engine.process.files import replace_file


def test_a_file_is_replaced_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    for content in (b"first", b"second"):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_file_as_it_was(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.toml"
    replace_file(path, b"first")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
