"""`hearth models add` and `hearth models remove`: a folder becomes a model of the catalogue once all that would keep a
replica from serving it has been looked for. It changes no folder; what it adds is served from the next start on.
"""

import argparse
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from engine.hostinfo import gpus
from engine.hostinfo.memory import device_budgets
from gateway.catalogue.catalogue import BUILT_IN, known_models, pulled_models
from gateway.catalogue.checksums import SUMS_NAME, ChecksumError, read_sums, require_sums
from gateway.catalogue.registrations import (
    parse_registration,
    registered_models,
    remove_registration,
    save_registration,
)
from gateway.commands.model_check import UnservableFolder, inspect_folder
from gateway.commands.output import add_action, fail, format_bytes, print_json
from gateway.config import Config, settings
from gateway.state_dir import open_state

# Of [[models]]; what else there is to say of a model, hearth.toml says.
_SETTINGS: Final = (
    *("replicas", "priority", "resident_s", "wake_s", "kept_kv_bytes", "context_tokens", "dtype", "kv_dtype"),
    *("task", "limits_class", "description"),
)


def add(actions: Any) -> None:
    lines = {key: description for key, _, description in settings()}
    adding = add_action(actions, "add", "make a folder a model of the catalogue, once it is found whole")
    adding.add_argument("name", help="what callers will say, like @cf/acme/assistant")
    adding.add_argument("folder", help="a Hugging Face folder; it is read where it is")
    adding.add_argument("--pinned", action="store_const", const=True, help=lines["models.pinned"])
    for name in _SETTINGS:
        adding.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=lines[f"models.{name}"])
    removing = add_action(actions, "remove", "take a model that was added out of the catalogue; its folder stays")
    removing.add_argument("name", help="its name, like @cf/acme/assistant")


def add_model(config: Config, options: argparse.Namespace) -> int:
    said = {name: value for name in ("pinned", *_SETTINGS) if (value := getattr(options, name)) is not None}
    folder = Path(options.folder).resolve()
    entry = parse_registration({"name": options.name, "folder": str(folder), **said}, "hearth models add")
    if problem := _taken(config, entry.name):
        return fail(problem)
    said_there = next((one for one in config.models if one.name == entry.name), entry)
    served = structs.replace(said_there, folder=entry.folder)  # what hearth.toml says goes before this command
    try:
        seen = inspect_folder(
            config,
            served,
            device_budgets(config.machine.device_bytes, gpus.usable_gpus(config.machine.device, gpus.installed_gpus())),
        )
        sums = read_sums(folder)
        require_sums(folder, sums)
    except (UnservableFolder, ChecksumError, UnicodeEncodeError) as error:  # the last: a folder's name that is no text
        return fail(f"{entry.name} was not added: {error}")
    open_state(config)
    kept = {name: getattr(entry, name) for name in ("name", "folder", *said)}
    try:
        save_registration(config, kept)
    except OSError as error:
        return fail(f"{entry.name} was not added: {config.added_folder} cannot be written: {error.strerror}")
    compared = f"{len(sums)} files are what {SUMS_NAME} says" if sums else f"there is no {SUMS_NAME} to compare with"
    if options.json:
        print_json({**kept, "weights_bytes": seen.sizes.stored_bytes, "compared_files": len(sums)})
    else:
        print(f"{entry.name}: {format_bytes(seen.sizes.stored_bytes)} of weights, whole; {compared}")
        print("It is in the catalogue: `hearth serve` serves it from its next start on")
    return 0


def _taken(config: Config, name: str) -> str:
    """Why it cannot be added under this name; empty where it can. [[models]] without a folder may wait for one."""
    for entry in known_models(config):
        if name == entry.name and (entry.folder is not None or name in (BUILT_IN, *pulled_models(config))):
            return f"the catalogue has {name} already; `hearth models remove` takes out what was added"
        if name in entry.aliases:
            return f"{name} is another name of {entry.name}: choose one that nothing has"
    return ""


def remove_model(config: Config, options: argparse.Namespace) -> int:
    found = [entry for entry in registered_models(config) if entry.name == options.name]
    if not found:
        return fail(_not_added(config, options.name))
    remove_registration(config, found[0])
    if options.json:
        print_json({"name": options.name, "removed": True, "folder": found[0].folder})
    else:
        print(f"{options.name} is no more in the catalogue from the next start on; {found[0].folder} is as it was")
    return 0


def _not_added(config: Config, name: str) -> str:
    if name in pulled_models(config):
        return (
            f"{name} was pulled, not added: remove its folder, or set `serve = false` in its [[models]] of hearth.toml"
        )
    if name == BUILT_IN or any(entry.name == name for entry in config.models):
        return f"{name} was not added by a command: set `serve = false` in its [[models]] of hearth.toml"
    return f"the catalogue has no {name}; `hearth models list` shows what it has"
