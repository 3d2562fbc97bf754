"""`hearth models add` and `hearth models remove`: a folder becomes a model of the catalogue once every reason why a
replica could not serve it is ruled out. It changes no folder; what it adds is served from the next start on.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from msgspec import structs

from engine.hostinfo import gpus
from engine.hostinfo.memory import device_budgets
from gateway.catalogue.catalogue import (
    BUILT_IN,
    known_models,
    parse_registration,
    pulled_models,
    registered_models,
    remove_registration,
    save_registration,
)
from gateway.catalogue.checksums import SUMS_NAME, ChecksumError, read_sums, require_sums
from gateway.commands.model_tools.folder_check import UnservableFolder, inspect_folder
from gateway.commands.terminal.options import Json, Source
from gateway.commands.terminal.output import fail, format_bytes, print_either
from gateway.config import Config
from gateway.config_reference import settings
from gateway.state_dir import open_state

_HELP: Final = {key.removeprefix("models."): text for key, _, text in settings()}


def _setting(name: str) -> Parameter:
    return Parameter(metavar="VALUE", help=_HELP[name])


@Parameter(name="*")
@dataclass(frozen=True)
class RegistrationOptions:
    """The settings of [[models]] that a command line may give, as they are written; hearth.toml gives all others."""

    pinned: Annotated[bool | None, Parameter(help=_HELP["pinned"])] = None
    replicas: Annotated[str | None, _setting("replicas")] = None
    priority: Annotated[str | None, _setting("priority")] = None
    resident_s: Annotated[str | None, _setting("resident_s")] = None
    wake_s: Annotated[str | None, _setting("wake_s")] = None
    kept_kv_bytes: Annotated[str | None, _setting("kept_kv_bytes")] = None
    context_tokens: Annotated[str | None, _setting("context_tokens")] = None
    dtype: Annotated[str | None, _setting("dtype")] = None
    kv_dtype: Annotated[str | None, _setting("kv_dtype")] = None
    task: Annotated[str | None, _setting("task")] = None
    limits_class: Annotated[str | None, _setting("limits_class")] = None
    description: Annotated[str | None, _setting("description")] = None


def add(
    name: Annotated[str, Parameter(help="what callers will say, like @cf/acme/assistant")],
    folder: Annotated[Path, Parameter(help="a Hugging Face folder; it is read where it is")],
    /,
    *,
    options: RegistrationOptions = RegistrationOptions(),
    json: Json = False,
    source: Source,
) -> int:
    """Make a folder a model of the catalogue, once it is found whole."""
    config, folder = source.load(), folder.resolve()
    changes = {option: value for option, value in asdict(options).items() if value is not None}
    entry = parse_registration({"name": name, "folder": str(folder), **changes}, "hearth models add")
    if problem := _name_problem(config, entry.name):
        return fail(problem)
    configured = next((model for model in config.models if model.name == entry.name), entry)
    served = structs.replace(configured, folder=entry.folder)  # what hearth.toml says goes before this command
    usable = gpus.usable_gpus(config.machine.device, gpus.installed_gpus())
    budgets = device_budgets(config.machine.device_bytes, usable)
    try:
        report = inspect_folder(config, served, budgets)
        sums = read_sums(folder)
        require_sums(folder, sums)
    except (UnservableFolder, ChecksumError, UnicodeEncodeError) as error:  # the last: a folder's name that is no text
        return fail(f"{entry.name} was not added: {error}")
    open_state(config)
    registration = {field: getattr(entry, field) for field in ("name", "folder", *changes)}
    try:
        save_registration(config, registration)
    except OSError as error:
        return fail(f"{entry.name} was not added: {config.added_folder} cannot be written: {error.strerror}")
    compared = f"{len(sums)} files are what {SUMS_NAME} says" if sums else f"there is no {SUMS_NAME} to compare with"
    stored_bytes = report.sizes.stored_bytes
    text = (
        f"{entry.name}: {format_bytes(stored_bytes)} of weights, whole; {compared}\n"
        "It is in the catalogue: `hearth serve` serves it from its next start on"
    )
    document = {**registration, "weights_bytes": stored_bytes, "compared_files": len(sums)}
    print_either(json, document, lambda: print(text))
    return 0


def _name_problem(config: Config, name: str) -> str:
    """Why no model can be added under this name; empty if one can. [[models]] without a folder may wait for one."""
    for entry in known_models(config):
        if name == entry.name and (entry.folder is not None or name in (BUILT_IN, *pulled_models(config))):
            return f"the catalogue has {name} already; `hearth models remove` takes out what was added"
        if name in entry.aliases:
            return f"{name} is another name of {entry.name}: choose one that nothing has"
    return ""


def remove(
    name: Annotated[str, Parameter(help="its name, like @cf/acme/assistant")], /, *, json: Json = False, source: Source
) -> int:
    """Take a model that was added out of the catalogue; its folder stays."""
    config = source.load()
    entry = next((entry for entry in registered_models(config) if entry.name == name), None)
    if entry is None:
        return fail(_not_added(config, name))
    remove_registration(config, entry)
    text = f"{name} is no more in the catalogue from the next start on; {entry.folder} is as it was"
    print_either(json, {"name": name, "removed": True, "folder": entry.folder}, lambda: print(text))
    return 0


def _not_added(config: Config, name: str) -> str:
    if name in pulled_models(config):
        return (
            f"{name} was pulled, not added: remove its folder, or set `serve = false` in its [[models]] of hearth.toml"
        )
    if name == BUILT_IN or any(entry.name == name for entry in config.models):
        return f"{name} was not added by a command: set `serve = false` in its [[models]] of hearth.toml"
    return f"the catalogue has no {name}; `hearth models list` shows what it has"
