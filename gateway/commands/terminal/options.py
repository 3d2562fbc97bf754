"""What the commands share on the command line: their apps, option types and settings. It knows no command."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Final, TypeVar

from cyclopts import App, Group, Parameter
from cyclopts.validators import MutuallyExclusive, Number
from msgspec import UNSET, UnsetType

from gateway.settings.config import Config, load_config, load_readable
from gateway.settings.machine import DEVICE_PATTERN

NONE: Final = "none"  # takes a setting back, where it may be unset
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_FIRST_DAY: Final = date(1970, 1, 1)
_DURATION_MAX_S: Final = 100 * 366 * 86400.0  # what ends later has no date that all can print

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Where a command line takes its settings from: --config and --state."""

    config: str | None = None
    state: str | None = None

    def load(self, *, host: str | None = None, port: int | None = None, device: str | None = None) -> Config:
        """The settings with these options over them. Raises SettingsError."""
        return load_config(self.config, state_folder=self.state, host=host, port=port, device=device)

    def load_without_models(self) -> Config:
        """As much of the settings as can be read, and none of [[models]]."""
        return load_readable(self.config, self.state)


def command_app(name: str, summary: str, teaching: str) -> App:
    """A command whose --help shows `summary`, its options, and then `teaching` as it is written."""
    return App(name=name, help=summary, help_epilogue=teaching, help_format="plaintext")


def parse_duration(text: str) -> float:
    """`30d` → seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise ValueError(f"{text!r} is no time: write a number and s, m, h, d or w, like 30d")
    if (seconds := int(match[1]) * float(_UNIT_SECONDS[match[2]])) > _DURATION_MAX_S:
        raise ValueError(f"{text!r} is more than 100 years")
    return seconds


def parse_day(text: str) -> int:
    """`2026-01-31` → days since 1970. Raises ValueError."""
    try:
        return (date.fromisoformat(text) - _FIRST_DAY).days
    except ValueError:
        raise ValueError(f"{text!r} is no day: write it like 2026-01-31, in UTC") from None


def parse_device(text: str) -> str:
    """The text where it names a device. Raises ValueError."""
    if re.fullmatch(DEVICE_PATTERN, text) is None:
        raise ValueError(f"{text!r} is no device: write auto, cpu, cuda or cuda:0")
    return text


def split_list(text: str) -> tuple[str, ...]:
    """`a, b` → its parts; `none` has none. Raises ValueError for an empty text, as of a variable that is not set: what
    an empty list lifts, such as a token's networks, is lifted by the word alone."""
    if not (parts := tuple(part.strip() for part in text.split(",") if part.strip())):
        raise ValueError(f"nothing is named; `{NONE}` says that it is to be so")
    return () if text == NONE else parts


def _number(kind: Callable[[str], T], name: str) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is no {name}; `{NONE}` takes it back") from None

    return parse


def parsed_by(parse: Callable[[str], Any], metavar: str, *, optional: bool = False) -> Parameter:
    """An option of one word that `parse` reads, or, where `optional`, `none`."""

    def convert(_: Any, tokens: Any) -> Any:
        text = tokens[0].value
        return None if optional and text == NONE else parse(text)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False, metavar=metavar)


SOURCE: Final = Parameter(parse=False)
PORTS: Final = Number(gte=0, lte=65535)
Source = Annotated[SettingsSource, SOURCE]
Json = Annotated[bool, Parameter(name="--json", help="print JSON")]
AccountRef = Annotated[str, Parameter(help="its name, or its id")]
TokenId = Annotated[str, Parameter(help="its id: the part between the underscores")]
Device = Annotated[
    str | None,
    parsed_by(parse_device, "DEVICE"),
    Parameter(help="where models run: auto, cpu, cuda or cuda:N (default: auto)"),
]
Duration = Annotated[float, parsed_by(parse_duration, "1d")]
Day = Annotated[int | None, parsed_by(parse_day, "DAY")]
# UNSET: the option was not given; None: it takes the setting back.
WordList = Annotated[tuple[str, ...] | UnsetType, parsed_by(split_list, "A,B")]
OptionalCount = Annotated[int | UnsetType | None, parsed_by(_number(int, "whole number"), "N", optional=True)]
OptionalAmount = Annotated[float | UnsetType | None, parsed_by(_number(float, "number"), "N", optional=True)]
OptionalText = Annotated[str | UnsetType | None, parsed_by(str, "TEXT", optional=True)]
OptionalDuration = Annotated[float | UnsetType | None, parsed_by(parse_duration, "30d", optional=True)]


def exclusive() -> Group:
    """Options of which one alone may be given."""
    return Group(validator=MutuallyExclusive())  # type: ignore[no-untyped-call]


def given_fields(options: object, names: Iterable[str]) -> dict[str, Any]:
    """The options of these names that were given, None for those that take a setting back."""
    return {name: value for name in names if (value := getattr(options, name)) is not UNSET}
