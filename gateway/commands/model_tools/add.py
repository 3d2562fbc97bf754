"""`hearth models add`, `set` and `remove`: a folder becomes a model of the catalogue once every reason why a replica
could not serve it is ruled out; its settings change; it goes. No folder changes, and a server that runs takes up what
is written here.
"""

import time
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter
from msgspec import structs

from engine.hostinfo import gpus
from engine.hostinfo.memory import device_budgets
from gateway.catalogue.catalogue import BUILT_IN, awaits_weights, known_models, price_of, pulled_models
from gateway.catalogue.checksums import SUMS_NAME, ChecksumError, read_sums, require_sums
from gateway.catalogue.registrations import (
    Registration,
    own_path,
    parse_entry,
    registration_of,
)
from gateway.commands.model_tools.folder_check import FolderReport, UnservableFolder, inspect_folder
from gateway.commands.model_tools.progress import NOT_RUNNING, Wait, wait_until_live
from gateway.commands.model_tools.registration import (
    NO_OPTIONS,
    RegistrationOptions,
    alias_problem,
    find_entry,
    lost_short_names,
)
from gateway.commands.model_tools.shared import (
    fresh_config,
    is_shared,
    remove_model,
    save_model,
    shares_models,
)
from gateway.commands.model_tools.shared_progress import wait_until_shared
from gateway.commands.model_tools.trial import NoRoomToTry, Untried, try_prompt
from gateway.commands.terminal.options import Json, Source
from gateway.commands.terminal.output import fail, format_bytes, print_either
from gateway.settings.config import CONFIG_NAME, Config, ModelEntryConfig
from gateway.state_dir import open_state

_FOLLOWED: Final = "a server that runs here takes it up within two seconds"
Name = Annotated[str, Parameter(help="its name, an alias, or the end of its name: @cf/acme/assistant, assistant")]


def add(
    name: Annotated[str, Parameter(help="what callers will say: @cf/acme/assistant, acme/assistant or assistant")],
    folder: Annotated[Path, Parameter(help="a Hugging Face folder; it is read where it is")],
    /,
    *,
    options: RegistrationOptions = NO_OPTIONS,
    untried: Untried = False,
    wait: Wait = False,
    json: Json = False,
    source: Source,
) -> int:
    """Make a folder a model of the catalogue, once it is found whole and has answered a prompt."""
    config, folder = fresh_config(source), folder.resolve()
    parse_entry({"name": name}, "hearth models add")
    new = Registration(own_path(config, name), {"name": name, "folder": str(folder)})
    registration = options.over(new)
    entry = parse_entry(registration.settings, "hearth models add")
    if problem := _name_problem(config, entry.name) or alias_problem(config, entry):
        return fail(problem)
    price_of(entry)
    configured = next((model for model in config.models if model.name == entry.name), entry)
    served = structs.replace(configured, folder=entry.folder)  # what hearth.toml says goes before this command
    try:
        report = _inspected(config, served)
        sums = read_sums(folder)
        require_sums(folder, sums)
        tried = "not tried" if untried else _tried(config, served, report)
    except (UnservableFolder, ChecksumError, UnicodeEncodeError) as error:  # the last: a folder's name that is no text
        return fail(f"{entry.name} was not added: {error}")
    open_state(config)
    note = lost_short_names(config, entry.name)
    if problem := save_model(config, registration):
        return fail(f"{entry.name} was not added: {problem}")
    compared = f"{len(sums)} files are what {SUMS_NAME} says" if sums else f"there is no {SUMS_NAME} to compare with"
    stored_bytes = report.sizes.stored_bytes
    found = f"{format_bytes(stored_bytes)} of weights, whole; {compared}; {tried}"
    text = f"{entry.name}: {found}\nIt is in the catalogue: {_FOLLOWED}"
    document = {**registration.settings, "weights_bytes": stored_bytes, "compared_files": len(sums)}
    print_either(json, document, lambda: print(text if not note else f"{text}\n{note}"))
    return _waited(config, entry.name, wait)


def _inspected(config: Config, entry: ModelEntryConfig) -> FolderReport:
    usable = gpus.usable_gpus(config.machine.device, gpus.installed_gpus())
    return inspect_folder(config, entry, device_budgets(config.machine.device_bytes, usable))


def _tried(config: Config, entry: ModelEntryConfig, report: FolderReport) -> str:
    """What is to be said of its first prompt. Raises UnservableFolder."""
    try:
        try_prompt(config, entry, report)
    except NoRoomToTry as problem:
        return f"not tried, for want of memory now: {problem}"
    return "it answered a prompt"


def _waited(config: Config, name: str, wait: bool) -> int:
    """Waits where that is wanted, until the model is served as it is asked for now, or gone."""
    if not wait:
        return 0
    began = time.monotonic()
    entry = next((entry for entry in known_models(config) if entry.name == name and entry.serve), None)
    problem = wait_until_shared(config, name) if shares_models(config) else wait_until_live(config, name, entry)
    if problem == NOT_RUNNING:
        print(problem)
        return 0
    if problem:
        return fail(f"{name}: {problem}")
    became = "on the machines that are to hold it" if shares_models(config) else "live"
    print(f"{name} is {'gone' if entry is None else became} after {time.monotonic() - began:.1f} s")
    return 0


def _name_problem(config: Config, name: str) -> str:
    """Why no model can be added under this name; empty if one can. [[models]] without a folder may wait for one."""
    for entry in known_models(config):
        pulled = name in pulled_models(config) and registration_of(config, name).settings == {"name": name}
        if pulled and shares_models(config):  # so far this host alone has it
            continue
        if name == entry.name and (entry.folder is not None or name in (BUILT_IN, *pulled_models(config))):
            return f"the catalogue has {name} already; `hearth models set` changes it, `remove` takes it out"
        if name in entry.aliases:
            return f"{name} is another name of {entry.name}: choose one that nothing has"
    return ""


def change(
    name: Name,
    /,
    *,
    options: RegistrationOptions = NO_OPTIONS,
    serve: Annotated[
        bool | None, Parameter(help="take it into the catalogue again, or out of it", negative="--no-serve")
    ] = None,
    wait: Wait = False,
    json: Json = False,
    source: Source,
) -> int:
    """Change a model's prices, aliases and settings; `none` takes one back."""
    config = fresh_config(source)
    entry, problem = find_entry(config, name)
    if entry is None or (problem := _is_of_file(config, entry.name)):
        return fail(problem)
    before = registration_of(config, entry.name)
    registration = options.over(before)
    if serve is not None:
        registration.settings["serve"] = serve
    if registration == before:
        return fail("say what to change: `hearth models set --help` lists it")
    changed = next(each for each in known_models(config, registration) if each.name == entry.name)
    price_of(changed)
    if problem := alias_problem(config, changed):
        return fail(f"{entry.name} was not changed: {problem}")
    try:
        if changed.serve and not awaits_weights(config, changed):
            _inspected(config, changed)
    except UnservableFolder as error:
        return fail(f"{entry.name} was not changed: {error}")
    open_state(config)
    if problem := save_model(config, registration):
        return fail(f"{entry.name} was not changed: {problem}")
    given = {field: value for field, value in registration.settings.items() if field not in ("name", "folder")}
    print_either(json, registration.settings, lambda: print(f"{entry.name}: {_listed(given)}\n{_FOLLOWED}"))
    return _waited(config, entry.name, wait)


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "as it was before any settings"


def _is_of_file(config: Config, name: str) -> str:
    """Why commands do not change a model that has an entry in hearth.toml; empty where it has none."""
    if not any(entry.name == name for entry in config.models):
        return ""
    return f"{name} has its [[models]] in {CONFIG_NAME}: change that; a server that runs takes it up by itself"


def remove(name: Name, /, *, wait: Wait = False, json: Json = False, source: Source) -> int:
    """Take a model out of the catalogue; its folder stays."""
    config = fresh_config(source)
    entry, problem = find_entry(config, name)
    if entry is None or not entry.serve:
        return fail(problem or f"{name} is out of the catalogue already")
    if any(model.name == entry.name for model in config.models):
        return fail(f"{entry.name} has its [[models]] in {CONFIG_NAME}: set `serve = false` there, or take it out")
    back, registration = "", registration_of(config, entry.name)
    shared = is_shared(config, registration)
    if entry.name == BUILT_IN or (entry.name in pulled_models(config) and not shared):
        registration.settings["serve"] = False
        back = f"; `hearth models set {entry.name} --serve` brings it back"
        open_state(config)
        if problem := save_model(config, registration):
            return fail(problem)
    else:
        if problem := remove_model(config, entry.name):
            return fail(problem)
    where = f"{entry.folder} is as it was" if entry.folder else "its folder is as it was"
    if shared:
        where = "on no host; files that were fetched go after an hour"
    text = f"{entry.name} is no more in the catalogue, {where}{back}\n{_FOLLOWED}: what it answers now, it ends"
    print_either(json, {"name": entry.name, "removed": True, "folder": entry.folder}, lambda: print(text))
    return _waited(config, entry.name, wait)
