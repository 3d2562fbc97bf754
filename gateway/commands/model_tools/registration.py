"""The settings of [[models]] that a command line may give, and what they are laid over. It looks into no folder."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

from cyclopts import Parameter
from msgspec import UNSET

from gateway.catalogue.catalogue import known_models
from gateway.catalogue.names import ModelNames
from gateway.catalogue.registrations import Registration
from gateway.commands.terminal.options import NONE, WordList
from gateway.settings.config import Config, ModelEntryConfig
from gateway.settings.reference import settings

_HELP: Final = {key.removeprefix("models."): text for key, _, text in settings()}
_PRICE: Final = "price_"


def _setting(name: str) -> Parameter:
    return Parameter(metavar="VALUE", help=_HELP[name])


@Parameter(name="*")
@dataclass(frozen=True)
class RegistrationOptions:
    """The settings of [[models]] that a command line may give, as they are written; hearth.toml gives all others."""

    alias: Annotated[WordList, Parameter(help="other names that callers may say, such as gpt-4o-mini")] = UNSET
    price_input: Annotated[str | None, _setting("price.input")] = None
    price_cached_input: Annotated[str | None, _setting("price.cached_input")] = None
    price_output: Annotated[str | None, _setting("price.output")] = None
    price_batch: Annotated[str | None, _setting("price.batch")] = None
    pinned: Annotated[bool | None, Parameter(help=_HELP["pinned"], negative="--no-pinned")] = None
    replicas: Annotated[str | None, _setting("replicas")] = None
    machines: Annotated[str | None, _setting("machines")] = None
    priority: Annotated[str | None, _setting("priority")] = None
    resident_s: Annotated[str | None, _setting("resident_s")] = None
    wake_s: Annotated[str | None, _setting("wake_s")] = None
    kept_kv_bytes: Annotated[str | None, _setting("kept_kv_bytes")] = None
    host_kv_bytes: Annotated[str | None, _setting("host_kv_bytes")] = None
    handover_bytes: Annotated[str | None, _setting("handover_bytes")] = None
    prefill_replicas: Annotated[str | None, _setting("prefill_replicas")] = None
    disk_kv_bytes: Annotated[str | None, _setting("disk_kv_bytes")] = None
    context_tokens: Annotated[str | None, _setting("context_tokens")] = None
    dtype: Annotated[str | None, _setting("dtype")] = None
    kv_dtype: Annotated[str | None, _setting("kv_dtype")] = None
    task: Annotated[str | None, _setting("task")] = None
    limits_class: Annotated[str | None, _setting("limits_class")] = None
    description: Annotated[str | None, _setting("description")] = None

    def over(self, registered: Registration) -> Registration:
        """What is registered with these settings over it; `none` takes one back."""
        changed, price = dict(registered.settings), dict(registered.settings.get("price", {}))
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or value is UNSET:
                continue
            if field.name.startswith(_PRICE):
                _set(price, field.name.removeprefix(_PRICE), value)
            elif field.name == "alias":
                _set(changed, "aliases", list(value) or NONE)
            else:
                _set(changed, field.name, value)
        _set(changed, "price", price or NONE)
        return Registration(registered.path, changed)


NO_OPTIONS: Final = RegistrationOptions()


def _set(settings: dict[str, Any], name: str, value: Any) -> None:
    if value == NONE:
        settings.pop(name, None)
    else:
        settings[name] = value


def find_entry(config: Config, name: str) -> tuple[ModelEntryConfig | None, str]:
    """The model of a name, an alias or the end of a name, also one that is not served; else why there is none. Raises
    SettingsError."""
    entries = {entry.name: entry for entry in known_models(config)}
    names = ModelNames({entry.name: entry.aliases for entry in entries.values()})
    whole = names.find(name)
    if whole is not None:
        return entries[whole], ""
    alike = " or ".join(names.suggest(name, lambda _: True))
    return (
        None,
        f"the catalogue has no {name}; {f'did you mean {alike}? ' if alike else ''}`hearth models list` shows all",
    )


def alias_problem(config: Config, entry: ModelEntryConfig) -> str:
    """Why the entry cannot have its aliases; empty where it can."""
    for other in known_models(config):
        for alias in entry.aliases:
            if other.name != entry.name and alias in (other.name, *other.aliases):
                return f"the alias {alias} is a name of {other.name}: choose one that nothing has"
            if alias == entry.name:
                return f"{alias} is its own name: an alias is another one"
    return ""


def lost_short_names(config: Config, name: str) -> str:
    """What a name more does to the ends of others that callers may say; empty where it does nothing."""
    names = [entry.name for entry in known_models(config) if entry.name != name]
    short = name.rpartition("/")[2]
    alike = [other for other in names if other.rpartition("/")[2] == short]
    if "/" not in name or not alike:
        return ""
    return f"note: {short} alone finds none of {', '.join([*alike, name])} any more; an alias can"
