"""Models that `hearth models add` made part of the catalogue: one TOML file each below the state folder, with the
settings that it would have in [[models]]. It knows no weights; what a folder must hold was looked at before."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from gateway.config import Config, ConfigError, ModelConfig


def added(config: Config) -> list[ModelConfig]:
    """In the order of their names. Raises ConfigError for a file that somebody wrote into and that cannot be read."""
    return [_read(path) for path in sorted(config.added_folder.glob("**/*.toml"))]


def keep(config: Config, settings: dict[str, Any]) -> None:
    """These settings of an entry, `name` and `folder` among them, which `parse` takes. They appear in one piece."""
    path = _path(config, settings["name"])
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [f"{name} = {_toml(value)}\n" for name, value in settings.items()]
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)


def forget(config: Config, entry: ModelConfig) -> None:
    """Its files stay where they are. It may be gone already."""
    _path(config, entry.name).unlink(missing_ok=True)


def parse(settings: dict[str, Any], where: object) -> ModelConfig:
    """Raises ConfigError, which names `where`. Texts are taken for the numbers that they spell."""
    try:
        return msgspec.convert(settings, ModelConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read(path: Path) -> ModelConfig:
    try:
        return parse(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}; `hearth models add` writes it anew") from error


def _path(config: Config, name: str) -> Path:
    """`@cf/acme/assistant` → added/@cf/acme/assistant.toml."""
    return config.added_folder / f"{name}.toml"


def _toml(value: str | int | float | bool) -> str:
    """JSON writes these as TOML does, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
