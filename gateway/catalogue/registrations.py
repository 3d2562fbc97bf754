"""Models that `hearth models add` made part of the catalogue: one TOML file each below the state folder, with the
settings that it would have in [[models]]. It knows no weights; what a folder must hold was looked at before."""

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from engine.process.files import replace_file
from gateway.config import Config, ModelEntryConfig, SettingsError


def registered_models(config: Config) -> list[ModelEntryConfig]:
    """The registered models, by name. Raises SettingsError for a file that cannot be read."""
    return [_read(path) for path in sorted(config.added_folder.glob("**/*.toml"))]


def save_registration(config: Config, settings: dict[str, Any]) -> None:
    """Writes the settings of an entry, `name` and `folder` among them, atomically. `parse_registration` reads them."""
    path = _path(config, settings["name"])
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [f"{name} = {_toml(value)}\n" for name, value in settings.items()]
    replace_file(path, "".join(lines).encode())


def remove_registration(config: Config, entry: ModelEntryConfig) -> None:
    """Removes an entry, which may be gone already. The model's files stay where they are."""
    _path(config, entry.name).unlink(missing_ok=True)


def parse_registration(settings: dict[str, Any], where: object) -> ModelEntryConfig:
    """Reads settings, also numbers that are written as text. Raises SettingsError, which names `where`."""
    try:
        return msgspec.convert(settings, ModelEntryConfig, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error


def _read(path: Path) -> ModelEntryConfig:
    try:
        return parse_registration(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as TOML: {error}; `hearth models add` writes it anew") from error


def _path(config: Config, name: str) -> Path:
    """`@cf/acme/assistant` → added/@cf/acme/assistant.toml."""
    return config.added_folder / f"{name}.toml"


def _toml(value: str | int | float | bool) -> str:
    """JSON writes these as TOML does, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
