"""A hearth.toml with every setting of an earlier version is read as that version read it."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from gateway.settings.config import load_config
from gateway.settings.reference import settings
from tests.compatibility.conftest import FILES


def leaves(document: Any, path: str = "") -> dict[str, Any]:
    """Every value by the names on the way to it; lists of tables have one entry here."""
    if isinstance(document, list) and document and isinstance(document[0], dict):
        return leaves(document[0], path)
    if isinstance(document, dict) and not path.endswith(".accounts"):
        return {key: v for name, inner in document.items() for key, v in leaves(inner, f"{path}.{name}").items()}
    return {path.removeprefix("."): document}


def test_every_setting_means_what_it_meant(tmp_path: Path) -> None:
    shutil.copy(FILES / "hearth.toml", tmp_path)
    written = json.loads((FILES / "hearth.toml.json").read_text().replace("FOLDER", str(tmp_path)))
    read = leaves(json.loads(msgspec.json.encode(load_config(tmp_path / "hearth.toml"))))
    assert {key: read[key] for key in leaves(written)} == leaves(written)


def test_the_file_has_every_setting_of_its_version() -> None:
    names = leaves(tomllib.loads((FILES / "hearth.toml").read_text())).keys()
    known = {key for key, _, _ in settings()}
    assert names <= known
    assert len(names) == 95
