"""hearth.toml as a whole, read once and frozen. It opens no other file, and knows of other packages only the settings
of issuers, of the store and of hosts.

Every field carries its one line of documentation, its default and its limits; `hearth doctor --settings` prints them.
"""

import contextlib
import datetime
import hashlib
import os
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.declared_problems import advised, declared_problem
from gateway.identity.cell_settings import CellsConfig
from gateway.identity.settings import ClusterConfig
from gateway.settings.doc import doc
from gateway.settings.lines import line_of_error, line_of_text, readable_part, readable_text
from gateway.settings.machine import MachineConfig
from gateway.settings.server import ServerConfig
from gateway.settings.telemetry import LogConfig, TelemetryConfig
from tenants.auth.issuers import Issuer
from tenants.store.settings import StoreConfig

CONFIG_NAME = "hearth.toml"
SOCKET_PATH_BYTES_MAX = 100
_LONGEST_SOCKET_NAME = "/ffffffffffff-999.sock"
_Section = TypeVar("_Section", bound=msgspec.Struct)
_Positive = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[float, Meta(ge=0)]
_Ranks = Annotated[int, Meta(ge=1, le=64)]
_Context = Annotated[int, Meta(ge=16)]
_StepTokens = Annotated[int, Meta(ge=16, le=65536)]
_Waiting = Annotated[int, Meta(ge=1, le=65536)]
_Sequences = Annotated[int, Meta(ge=1, le=4096)]


class SettingsError(ValueError):
    """hearth.toml, or an option that overrides it, says something that cannot be; the message says what and where."""


class PriceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[models.price]: neurons per million tokens."""

    input: Annotated[float, doc("neurons per million prompt tokens", ge=0)] = 1000.0
    cached_input: Annotated[_NotNegative | None, doc("neurons per million cached tokens; default: input / 5")] = None
    output: Annotated[float, doc("neurons per million completion tokens", ge=0)] = 4000.0
    batch: Annotated[float, doc("what queued requests cost of these prices", ge=0, le=1)] = 0.5


_ToolFormat = Annotated[
    str,
    Meta(
        pattern="^(deepseek|deepseek_fenced|ember|harmony|hermes|kimi|llama3_json|mistral|mistral_named|pythonic|qwen_coder)$"
    ),
]
_NAME = r"^(@[a-z]{2,8}/)?[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,2}$"
_Alias = Annotated[
    str, Meta(pattern=r"^@?[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9][A-Za-z0-9._:-]*){0,3}$", max_length=200)
]
_Tag = Annotated[str, Meta(min_length=1, max_length=50)]


class ModelEntryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[models]]: one model that tenants may call. The same name as a known model's changes that one."""

    name: Annotated[str, doc("what callers say: @cf/acme/notes, acme/notes or notes", pattern=_NAME)]
    folder: Annotated[str | None, doc("Hugging Face folder; default: the built-in or pulled one")] = None
    task: Annotated[
        Literal["Text Generation", "Text Embeddings", "Text Classification"] | None,
        doc("what it does; default: what its folder shows it to be made for"),
    ] = None
    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        doc("how it gives vectors where callers do not say; default: as its folder says"),
    ] = None
    matryoshka: Annotated[bool | None, doc("callers may have its vectors cut; default: as config.json says")] = None
    description: Annotated[str, doc("shown by /ai/models/search", max_length=1000)] = ""
    aliases: Annotated[list[_Alias], doc("other names that callers may say, such as gpt-4o-mini", max_length=16)] = []
    tags: Annotated[list[_Tag], doc("words beside it in /ai/models/search", max_length=16)] = []
    beta: Annotated[bool, doc("an experiment, which hide_experimental leaves out of the search")] = False
    planned_deprecation_date: Annotated[
        datetime.date | None, doc("a day, like 2027-01-31, from which on it is not served but 410")
    ] = None
    terms: Annotated[str, doc("address of the terms of its use, shown by the search", max_length=500)] = ""
    info: Annotated[str, doc("address of a page about it, shown by the search", max_length=500)] = ""
    price: Annotated[PriceConfig, doc("table, neurons per million tokens")] = PriceConfig()
    dialect: Annotated[
        str,
        doc(
            "bodies of /ai/run: native (prompt or messages) or chat (chat completions in the envelope)",
            pattern="^(native|chat)$",
        ),
    ] = "native"
    tool_format: Annotated[
        _ToolFormat | None,
        doc(
            "how it writes calls of tools, a name of gateway/tool_parsers/registry.py; default: what its template shows"
        ),
    ] = None
    default_tokens: Annotated[int, doc("output tokens of a completion without max_tokens", ge=1, le=1 << 24)] = 4096
    limits_class: Annotated[
        str, doc("limits of this class of models count its calls", pattern="^[a-z0-9][a-z0-9._-]{0,31}$")
    ] = "standard"
    serve: Annotated[bool, doc("false leaves it out of the catalogue")] = True
    replicas: Annotated[int, doc("copies on each machine", ge=1, le=64)] = 1
    machines: Annotated[int, doc("machines of a cluster that hold it; 0: all", ge=0, le=10_000)] = 0
    gpus: Annotated[_Ranks | Literal["auto"], doc("GPUs of a copy, a process each (on a CPU ranks); auto: fewest")] = 1
    stages: Annotated[_Ranks | Literal["auto"], doc("runs of layers, `gpus` each; auto: where links are weak")] = 1
    dtype: Annotated[str, doc("auto, float32, bfloat16 or float16", pattern="^(auto|float32|bfloat16|float16)$")] = (
        "auto"
    )
    context_tokens: Annotated[_Context | None, doc("context; default: what config.json says")] = None
    random_weights: Annotated[bool, doc("weights made up, for measuring where only config.json is there")] = False
    kv_dtype: Annotated[str, doc("auto, or fp8 to halve KV on GPUs", pattern="^(auto|fp8)$")] = "auto"
    kv_bytes: Annotated[_Positive | None, doc("memory for KV blocks; default: from what is left")] = None
    block_tokens: Annotated[int, doc("tokens per KV block", ge=1, le=1024)] = 16
    step_tokens: Annotated[_StepTokens | None, doc("token budget of a step; default: 512, on a GPU by gap_ms")] = None
    gap_ms: Annotated[
        float, doc("longest step of prompts while others stream, and of several accounts", ge=1, le=60000)
    ] = 20.0
    sequences: Annotated[_Sequences | None, doc("sequences that run at once; default: 64, on a GPU 512")] = None
    waiting: Annotated[
        _Waiting | None,
        doc("sequences that wait at once, above it 429; default: 1024, of texts for vectors 8192"),
    ] = None
    scope_floor_blocks: Annotated[int, doc("cached blocks that others leave a tenant", ge=0)] = 0
    scope_cap_blocks: Annotated[_Positive | None, doc("most unused cached blocks of a tenant; default: no cap")] = None
    pinned: Annotated[bool, doc("never leaves the device, whoever else wants its room")] = False
    priority: Annotated[
        float,
        doc("what its waiting calls count beside other models' where there is no room for both", gt=0, le=1e6),
    ] = 1.0
    resident_s: Annotated[float, doc("once woken it stays on the device so long, even idle", ge=0, le=3600)] = 0.2
    wake_s: Annotated[float, doc("its calls wait so long for others', then interrupt them", ge=0, le=3600)] = 0.5
    kept_kv_bytes: Annotated[int, doc("host memory for KV of system prompts while it sleeps; 0: none", ge=0)] = 1 << 30
    host_kv_bytes: Annotated[
        int, doc("host memory for KV that its device has no more room for; 0: that is computed again", ge=0)
    ] = 0
    handover_bytes: Annotated[int, doc("host memory for KV that other replicas hand over; 0: none", ge=0)] = 0
    prefill_replicas: Annotated[int, doc("copies that compute prompts for the others; -1: by load", ge=-1, le=64)] = 0
    disk_kv_bytes: Annotated[
        int, doc("disk below host_kv_bytes for KV that it has no more room for, of each replica; 0: none", ge=0)
    ] = 0
    public_prefixes: Annotated[
        list[str],
        doc("files of system prompts that every tenant's calls may read from the cache", max_length=64),
    ] = []


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """hearth.toml as a whole. `load_config` makes all paths absolute."""

    state_folder: Annotated[str, doc("database, credentials, secret, sockets and models")] = ".hearth"
    server: ServerConfig = ServerConfig()
    store: StoreConfig = StoreConfig()
    machine: MachineConfig = MachineConfig()
    models: Annotated[list[ModelEntryConfig], Meta(max_length=256)] = []
    issuers: Annotated[list[Issuer], Meta(max_length=64)] = []
    telemetry: TelemetryConfig = TelemetryConfig()
    log: LogConfig = LogConfig()
    cluster: ClusterConfig = ClusterConfig()
    cells: CellsConfig = CellsConfig()

    @property
    def state(self) -> Path:
        return Path(self.state_folder)

    @property
    def store_url(self) -> str:
        return self.store.full_url(f"sqlite:{self.state / 'hearth.db'}")

    @property
    def secret_path(self) -> Path:
        return self.state / "secret"

    @property
    def credentials_path(self) -> Path:
        return self.state / "credentials.json"

    @property
    def outbox_folder(self) -> Path:
        return self.state / "outbox"

    @property
    def models_folder(self) -> Path:
        return self.state / "models"

    @property
    def added_folder(self) -> Path:
        """The registrations that `hearth models add` made."""
        return self.state / "added"

    @property
    def kernels_folder(self) -> Path:
        """Compiled GPU kernels, kept from start to start."""
        return self.state / "kernels"

    @property
    def kv_folder(self) -> Path:
        """Encrypted KV of models with disk_kv_bytes, in files that go with their process."""
        return Path(self.machine.kv_folder) if self.machine.kv_folder else self.state / "kv"

    @property
    def run_folder(self) -> Path:
        """Where sockets live: below the state folder, or, where a socket's path would be too long, a short private
        folder of the temp dir that is the same for every process of this state folder."""
        folder = Path(self.machine.folder) if self.machine.folder else self.state / "run"
        if len(os.fsencode(folder)) + len(_LONGEST_SOCKET_NAME) <= SOCKET_PATH_BYTES_MAX:
            return folder
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"hearth-{os.getuid()}-{digest}"

    @property
    def machine_address(self) -> str:
        return self.machine.address or f"unix:{self.run_folder / 'machine.sock'}"

    @property
    def machine_addresses(self) -> list[str]:
        return list(self.machine.addresses) or [self.machine_address]


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Where settings came from, for whoever follows them: `path` None is ./hearth.toml, which need not exist. `load`
    reads them anew, and raises SettingsError."""

    path: str | None
    load: Callable[[], Config]


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    host: str | None = None,
    port: int | None = None,
    state_folder: str | os.PathLike[str] | None = None,
    store_url: str | None = None,
    device: str | None = None,
) -> Config:
    """Reads `path` (None: ./hearth.toml where it exists), lays the given options over it and checks the whole.

    Relative paths in the file are relative to the file. Raises SettingsError.
    """
    file = Path(path) if path is not None else Path(CONFIG_NAME)
    if path is not None and not file.is_file():
        raise SettingsError(f"there is no file {file}")
    text, document = _read(file) if file.is_file() else ("", {})
    _override(document, "server", {"host": host, "port": port})
    _override(document, "store", {"url": store_url})
    _override(document, "machine", {"device": device})
    base = file.resolve().parent
    if state_folder is not None:
        document["state_folder"] = str(Path(state_folder).resolve())
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        problem = advised(declared_problem(str(error), Config))
        raise SettingsError(f"{_place(file, line_of_error(text, str(error)))}: {problem}") from error
    names = [name for model in config.models for name in (model.name, *model.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{_place(file, line_of_text(text, name))}: the model {name} is there twice")
    _require_unique(file.name, "issuer", [issuer.name for issuer in config.issuers])
    _require_unique(file.name, "issuer's `iss`", [issuer.issuer for issuer in config.issuers])
    for model in config.models:
        if model.scope_cap_blocks is not None and model.scope_cap_blocks < model.scope_floor_blocks:
            raise SettingsError(f"{file.name}: scope_cap_blocks of {model.name} is below its scope_floor_blocks")
    return _absolute(config, base)


def _require_unique(file: str, kind: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{file}: the {kind} {name} is there twice")


def load_readable(path: str | None, state_folder: str | None) -> Config:
    """What can be read of a file that is wrong, models left out: the tables before the line that is no TOML, else none
    but the state folder."""
    file = Path(path or CONFIG_NAME)
    text = readable_text(file)
    for part in (text, readable_part(text)):
        with contextlib.suppress(tomllib.TOMLDecodeError, msgspec.ValidationError):
            document = {name: value for name, value in tomllib.loads(part).items() if name != "models"}
            document |= {} if state_folder is None else {"state_folder": str(Path(state_folder).resolve())}
            return _absolute(msgspec.convert(document, Config), file.resolve().parent)
    return _absolute(Config(state_folder=state_folder or Config().state_folder), file.resolve().parent)


def _place(file: Path, line: int | None) -> str:
    return file.name if line is None else f"{file.name}: line {line}"


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text()
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error


def _override(document: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    if overrides := {key: value for key, value in values.items() if value is not None}:
        document[section] = {**document.get(section, {}), **overrides}


def _absolute(config: Config, base: Path) -> Config:
    models = []
    for model in config.models:
        prefixes = [str((base / path).resolve()) for path in model.public_prefixes]
        models.append(msgspec.structs.replace(_resolved(model, base, "folder"), public_prefixes=prefixes))
    return msgspec.structs.replace(
        config,
        state_folder=str((base / config.state_folder).resolve()),
        models=models,
        issuers=[_resolved(issuer, base, "jwks_file", "ca_file") for issuer in config.issuers],
        machine=_resolved(config.machine, base, "folder", "kv_folder"),
        server=_resolved(config.server, base, "certificate", "key"),
        log=_resolved(config.log, base, "file"),
        cluster=_resolved(config.cluster, base, "certificate", "key", "authority"),
        cells=msgspec.structs.replace(
            config.cells, others=[_resolved(other, base, "authority") for other in config.cells.others]
        ),
    )


def _resolved(section: _Section, base: Path, *paths: str) -> _Section:
    """The section with these paths absolute, where they are set."""
    relative = {name: path for name in paths if (path := getattr(section, name))}
    return msgspec.structs.replace(section, **{name: str((base / path).resolve()) for name, path in relative.items()})
