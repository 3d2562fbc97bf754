"""What `hearth models add`, `set` and `remove` told of models: one TOML file for each below the state folder, with
settings that it would have in [[models]]. It knows no other models, and looks into no folder.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.process.files import replace_file
from gateway.catalogue.mirror import mirrored_settings, read_mirror
from gateway.declared_problems import declared_problem
from gateway.settings.config import Config, ModelEntryConfig, SettingsError


@dataclass(frozen=True, slots=True)
class Registration:
    """The settings of one model that were given, as they are written, `name` among them; an entry could have them."""

    path: Path
    settings: dict[str, Any]

    def over(self, entry: ModelEntryConfig | None) -> ModelEntryConfig:
        """These settings over those of `entry`, which was known without them."""
        given = parse_entry(self.settings, self.path)
        if entry is None:
            return given
        return msgspec.structs.replace(entry, **{name: getattr(given, name) for name in self.settings})


def registrations(config: Config) -> list[Registration]:
    """The models of this host's cluster, then all that was told on this host, by name. Raises SettingsError for a file
    that cannot be read."""
    shared = mirrored_settings(config, read_mirror(config.cluster.mirror_path(config.state)))
    own = [_read(path) for path in sorted(config.added_folder.glob("**/*.toml"))]
    return [*(Registration(config.cluster.mirror_path(config.state), settings) for settings in shared), *own]


def registration_of(config: Config, name: str) -> Registration:
    """That of the model of this whole name, this host's own before its cluster's; it says its name alone where nothing
    was told. Raises SettingsError."""
    path = own_path(config, name)
    if path.is_file():
        return _read(path)
    path_of_mirror = config.cluster.mirror_path(config.state)
    for settings in mirrored_settings(config, read_mirror(path_of_mirror)):
        if settings["name"] == name:
            return Registration(path_of_mirror, settings)
    return Registration(path, {"name": name})


def save_registration(registration: Registration) -> None:
    """Writes it in place of what was registered under the name, atomically. Raises OSError, and SettingsError for what
    would be no entry."""
    path, settings = registration.path, registration.settings
    values = msgspec.to_builtins(parse_entry(settings, path))
    if "price" in settings:
        values["price"] = {name: values["price"][name] for name in settings["price"]}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, "".join(f"{name} = {_toml(values[name])}\n" for name in settings).encode())


def remove_registration(config: Config, name: str) -> None:
    """Removes what is registered, which may be gone already. The model's files stay where they are."""
    own_path(config, name).unlink(missing_ok=True)


def parse_entry(settings: dict[str, Any], where: object) -> ModelEntryConfig:
    """Reads settings, also numbers that are written as text. Raises SettingsError, which names `where`."""
    try:
        return msgspec.convert(settings, ModelEntryConfig, strict=False)
    except msgspec.ValidationError as error:
        if str(error).endswith("`$.name`"):
            text = f"{settings['name']!r} is no name of a model; one is like @cf/acme/notes, acme/notes or notes"
            raise SettingsError(f"{where}: {text}") from error
        raise SettingsError(f"{where}: {declared_problem(str(error), ModelEntryConfig)}") from error


def _read(path: Path) -> Registration:
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as TOML: {error}; `hearth models add` writes it anew") from error
    parse_entry(settings, path)
    return Registration(path, settings)


def own_path(config: Config, name: str) -> Path:
    """Where this host's own registration of a name is, or would be: added/@cf/acme/assistant.toml."""
    return config.added_folder / f"{name}.toml"


def _toml(value: Any) -> str:
    """A value as TOML: JSON writes texts, numbers and lists alike, but for one character."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
