"""teams.yaml: plans, accounts and their tokens as a file declares them. It compares them with no store.

YAML or TOML. What is not named stays as it is. Every mistake is found, and told with its line where the parser says it.
"""

import re
import tomllib
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec import UNSET, UnsetType, structs

from gateway.admin.account import SettingsChange
from gateway.declared_problems import declared_problem
from tenants.auth.accounts import checked_account_name, checked_name
from tenants.auth.api_token import holds_token
from tenants.records.accounts import Plan, name_key
from tenants.records.grants import Permission
from tenants.records.limits import Limits

FILE_BYTES_MAX: Final = 4 << 20
NODES_MAX: Final = 500_000  # of YAML, with what aliases repeat
PROBLEMS_MAX: Final = 20  # told at once
_Place = tuple[str | int, ...]
_PATH: Final = re.compile(r" - at `(?:key in )?\$([^`]*)`")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_NEVER: Final = "never"
_SECTIONS: Final = ("plans", "accounts")


class DeclaredToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`expires` is the first day or moment, in UTC, on which it opens nothing any more, or `never`."""

    permissions: tuple[Permission, ...] | UnsetType = UNSET
    models: tuple[str, ...] | UnsetType = UNSET
    networks: tuple[str, ...] | UnsetType = UNSET
    expires: str | UnsetType = UNSET
    limits: Limits | UnsetType = UNSET

    def __post_init__(self) -> None:
        expiry_of(self)


class DeclaredAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`limits` are the operator's for this account, in place of its plan's. An account that is named by its `id` gets
    the name that it has in the file."""

    id: str | UnsetType = UNSET
    plan: str | UnsetType = UNSET
    limits: Limits | UnsetType = UNSET
    settings: SettingsChange | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET
    tokens: dict[str, DeclaredToken] | UnsetType = UNSET


# The fields of Plan, each of which may be left out; its name is the key in the file, its revision the store's.
DeclaredPlan: Final[Any] = msgspec.defstruct(
    "DeclaredPlan",
    [
        (field.name, field.type | UnsetType, UNSET)
        for field in structs.fields(Plan)
        if field.name not in ("name", "revision")
    ],
    frozen=True,
    forbid_unknown_fields=True,
)


class DeclaredTeams(msgspec.Struct, frozen=True):
    """`plans` are DeclaredPlans. `lines` are those of places in the file, such as ("accounts", "acme", "plan")."""

    plans: dict[str, Any]
    accounts: dict[str, DeclaredAccount]
    lines: dict[_Place, int]
    path: str

    def at(self, *place: str | int) -> str:
        """`teams.yaml:7`, for the innermost place that has a line."""
        for end in range(len(place), 0, -1):
            if place[:end] in self.lines:
                return f"{self.path}:{self.lines[place[:end]]}"
        return self.path


class InvalidTeams(ValueError):
    """The file cannot be applied; one line for each mistake. Nothing was changed."""

    def __init__(self, problems: list[str]) -> None:
        more = len(problems) - PROBLEMS_MAX
        shown = [*problems[:PROBLEMS_MAX], *([f"… and {more} more"] if more > 0 else [])]
        super().__init__("\n".join([*shown, "nothing was changed"]))


def expiry_of(token: DeclaredToken) -> int | None:
    """Seconds since 1970; None: never. Raises ValueError."""
    if isinstance(token.expires, UnsetType) or token.expires == _NEVER:
        return None
    try:
        moment = datetime.fromisoformat(token.expires)
    except ValueError:
        raise ValueError(f"{token.expires!r} is no day: write it like 2030-01-31, or {_NEVER}") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def read_teams(path: Path) -> DeclaredTeams:
    """Raises InvalidTeams, and OSError."""
    content = path.read_bytes()
    if len(content) > FILE_BYTES_MAX:
        raise InvalidTeams([f"{path} has {len(content):,} bytes; the most is {FILE_BYTES_MAX:,}"])
    reader = _Reader(str(path))
    document = reader.toml(content) if path.suffix == ".toml" else reader.yaml(content)
    if not document and not reader.problems:
        raise InvalidTeams([f"{path} declares nothing: write `accounts: {{}}` where that is meant"])
    teams = reader.teams(document)
    if reader.problems:
        raise InvalidTeams(reader.problems)
    return teams


class _Reader:
    """Reads one file, and gathers what is wrong with it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: dict[_Place, int] = {}
        self._nodes = 0
        self._scalars = yaml.SafeLoader("")
        self.problems: list[str] = []

    def toml(self, content: bytes) -> Any:
        try:
            return _without_dates(tomllib.loads(content.decode()))
        except ValueError as error:  # it has the line
            raise InvalidTeams([f"{self._path}: {error}"]) from None

    def yaml(self, content: bytes) -> Any:
        try:
            node = yaml.compose(content, Loader=yaml.SafeLoader)
            return {} if node is None else self._value(node, ())
        except yaml.YAMLError as error:
            raise InvalidTeams([_not_yaml(self._path, error)]) from None
        except RecursionError:
            raise InvalidTeams([f"{self._path} has too many levels"]) from None

    def _value(self, node: Any, place: _Place) -> Any:
        """The plain value of a node. Its line is noted, and keys that are there twice."""
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise InvalidTeams([f"{self._path} has more than {NODES_MAX:,} values, with what its aliases repeat"])
        self._lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, place))
        if isinstance(node, yaml.SequenceNode):
            return [self._value(each, (*place, number)) for number, each in enumerate(node.value)]
        value = self._scalars.construct_object(node)
        return node.value if isinstance(value, date) else value

    def _pairs(self, node: Any, place: _Place) -> Iterator[tuple[str, Any]]:
        seen: dict[str, tuple[str, int]] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                self.problems.append(f"{self._path}:{line}: {key!r} is no text; write a name like 007 or yes in quotes")
                continue
            alike = name_key(key) if place == ("accounts",) else key
            if alike in seen:
                other, first = seen[alike]
                same = "" if other == key else f", since {other!r} counts as the same name"
                self.problems.append(f"{self._path}:{line}: {key!r} is here twice, first in line {first}{same}")
            seen.setdefault(alike, (key, line))
            self._lines[(*place, key)] = line
            yield key, self._value(value_node, (*place, key))

    def teams(self, document: Any) -> DeclaredTeams:
        plans: dict[str, Any] = {}
        accounts: dict[str, DeclaredAccount] = {}
        if not isinstance(document, dict):
            self._tell((), f"expected {' and '.join(_SECTIONS)}")
            document = {}
        for section in document:
            if section not in _SECTIONS:
                self._tell((section,), f"unknown section {section!r}; there are {' and '.join(_SECTIONS)}")
            elif not isinstance(document[section] or {}, dict):
                self._tell((section,), f"{section!r} has names with what is declared of each")
                document = {**document, section: {}}
        for name, declared in (document.get("plans") or {}).items():
            place = ("plans", name)
            if (plan := self._converted(place, declared or {}, DeclaredPlan)) is not None:
                plans[name] = plan
                self._check(place, Plan, name=name)
        for name, declared in (document.get("accounts") or {}).items():
            place = ("accounts", name)
            self._check(place, checked_account_name, name)
            fields = dict(declared) if isinstance(declared, dict) else declared or {}
            tokens = self._tokens((*place, "tokens"), fields.pop("tokens", None)) if isinstance(fields, dict) else UNSET
            if (account := self._converted(place, fields, DeclaredAccount)) is not None:
                accounts[name] = structs.replace(account, tokens=tokens)
        return DeclaredTeams(plans, accounts, self._lines, self._path)

    def _tokens(self, place: _Place, declared: Any) -> dict[str, DeclaredToken] | UnsetType:
        if declared is None:
            return UNSET
        if not isinstance(declared, dict):
            self._tell(place, "expected names with what is declared of each token")
            return UNSET
        tokens = {}
        for name, fields in declared.items():
            self._check((*place, name), checked_name, name)
            if (token := self._converted((*place, name), fields or {}, DeclaredToken)) is not None:
                tokens[name] = token
        return tokens

    def _check(self, place: _Place, check: Any, *values: str, **named: str) -> None:
        try:
            check(*values, **named)
        except ValueError as error:
            self._tell(place, str(error))

    def _converted(self, place: _Place, value: Any, kind: Any) -> Any:
        try:
            return msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            self._tell((*place, *_place_in(str(error))), declared_problem(str(error), kind).problem)
        return None

    def _tell(self, place: _Place, problem: str) -> None:
        line = next((self._lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in self._lines), None)
        where = f"{self._path}:{line}" if line is not None else self._path
        names = ".".join("…" if holds_token(str(step)) else str(step) for step in place)
        self.problems.append(f"{where}: {names}: {problem}" if names else f"{where}: {problem}")


def _not_yaml(path: str, error: yaml.YAMLError) -> str:
    """What the parser said, behind the line at which it gave up."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path}: {' '.join(str(error).split())}"
    said = " ".join(each for each in (error.context, error.problem) if each)
    return f"{path}:{error.problem_mark.line + 1}: this is not YAML: {said}"


def _without_dates(value: Any) -> Any:
    """The value with dates as their text, as YAML's are read."""
    if isinstance(value, dict):
        return {key: _without_dates(each) for key, each in value.items()}
    return str(value) if isinstance(value, date) else value


def _place_in(error: str) -> _Place:
    """Where in a value msgspec found an error, as far as it says: `$.limits.classes[...].burst` → limits, classes."""
    path = _PATH.search(error)
    place, hidden, _ = ("", "", "") if path is None else path[1].partition("[...]")
    steps: list[str | int] = [int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", place)]
    if (unknown := _UNKNOWN.search(error)) and not hidden:
        steps.append(unknown[1])
    return tuple(steps)
