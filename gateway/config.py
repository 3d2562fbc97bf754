"""All settings, read once from `hearth.toml` and frozen. It opens no other file, and knows of other packages only the
settings of issuers.

Every field carries its one line of documentation, its default and its limits; `hearth doctor --settings` prints them.
"""

import datetime
import hashlib
import ipaddress
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tenants.auth.issuers import Issuer

SOCKET_PATH_BYTES_MAX = 100
_LONGEST_SOCKET_NAME = "/ffffffffffff-999.sock"
CONFIG_NAME = "hearth.toml"
_Positive = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[float, Meta(ge=0)]
_Context = Annotated[int, Meta(ge=16)]
_StepTokens = Annotated[int, Meta(ge=16, le=65536)]
_Waiting = Annotated[int, Meta(ge=1, le=65536)]
_Sequences = Annotated[int, Meta(ge=1, le=4096)]
_Section = TypeVar("_Section", bound=msgspec.Struct)


class SettingsError(ValueError):
    """hearth.toml, or an option that overrides it, says something that cannot be; the message says what and where."""


_HostName = Annotated[str, Meta(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9._-]*[a-z0-9])?$", max_length=255)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[server]: the HTTP side."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 takes a free one", ge=0, le=65535)] = 8787
    header_bytes_max: Annotated[int, Meta(description="largest request head; above it 431", ge=1024)] = 16 << 10
    header_s: Annotated[float, Meta(description="a request head must be complete within this time", gt=0)] = 10.0
    body_bytes_max: Annotated[int, Meta(description="largest request body; above it 413", ge=1024)] = 10_000_000
    body_s: Annotated[float, Meta(description="a request body must be complete within this time", gt=0)] = 30.0
    connections: Annotated[int, Meta(description="open connections at once; above it 503", ge=1)] = 16384
    requests: Annotated[int, Meta(description="inference requests in progress at once; above it 429", ge=1)] = 12288
    first_byte_s: Annotated[float, Meta(description="a stream's first byte leaves within this time", gt=0)] = 1.0
    ping_s: Annotated[float, Meta(description="silence in a stream is broken by a comment after it", gt=0)] = 8.0
    blocked_s: Annotated[float, Meta(description="a client that reads nothing this long is dropped", gt=0)] = 30.0
    wait_s: Annotated[float, Meta(description="how long a call waits for a replica that can serve", ge=0)] = 30.0
    request_s: Annotated[float, Meta(description="longest life of one inference request; then 408", gt=0)] = 900.0
    region: Annotated[
        str,
        Meta(
            description="where this gateway and its machines are; accounts may allow some", pattern="^[a-z0-9-]{0,32}$"
        ),
    ] = ""
    private_notices: Annotated[
        bool, Meta(description="notices of soft caps may go to private addresses and over plain http")
    ] = False
    drain_s: Annotated[float, Meta(description="on SIGTERM, running streams get this long to end", ge=0)] = 20.0
    scrub_memory: Annotated[
        bool,
        Meta(description="all processes overwrite the memory that they free: zero retention then holds for it as well"),
    ] = False
    address_connections: Annotated[
        int, Meta(description="open connections of one address, or IPv6 /64, at once; above it 503", ge=1)
    ] = 4096
    certificate: Annotated[
        str, Meta(description="PEM file of a certificate chain: HTTPS, read anew when the file changes; with `key`")
    ] = ""
    key: Annotated[str, Meta(description="PEM file of the certificate's private key, not encrypted")] = ""
    hosts: Annotated[
        list[_HostName],
        Meta(description="names in Host that are served, also *.example.com; empty: any", max_length=100),
    ] = []
    proxies: Annotated[
        list[str], Meta(description="networks of proxies whose word on a caller's address counts", max_length=100)
    ] = []
    proxy_header: Annotated[
        str,
        Meta(
            description="where these proxies write it: x-forwarded-for or forwarded; the other one never counts",
            pattern="^(x-forwarded-for|forwarded)$",
        ),
    ] = "x-forwarded-for"
    batch_keep_s: Annotated[
        float, Meta(description="a batch's results are kept for so long after its end", ge=60, le=2_592_000)
    ] = 86_400.0
    neuron_usd: Annotated[
        float, Meta(description="US dollars for a neuron, where a marketplace's list of models is in dollars", ge=0)
    ] = 0.000011
    metrics_networks: Annotated[
        tuple[str, ...], Meta(description="networks that read /metrics without an operator's token", max_length=100)
    ] = ("127.0.0.0/8", "::1/128")

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("`certificate` and `key` go together; one of them is missing")
        for name in ("proxies", "metrics_networks"):
            for network in getattr(self, name):
                try:
                    ipaddress.ip_network(network)
                except ValueError as error:
                    problem = f"`{name}`: {network!r} is no network: {error}; write it like 10.0.0.0/8 or ::1/128"
                    raise ValueError(problem) from None


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[store]: where accounts, quotas and usage are kept."""

    url: Annotated[
        str | None,
        Meta(description="sqlite:PATH for one gateway, redis://HOST:PORT/DB for many; default sqlite in state_folder"),
    ] = None


class MachineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[machine]: this host's engine, and the machines that the gateway talks to."""

    name: Annotated[str, Meta(description="name of this machine in logs", pattern="^[A-Za-z0-9._-]{1,64}$")] = "local"
    address: Annotated[
        str | None, Meta(description="unix:PATH or tcp:127.0.0.1:PORT where it listens; default below state_folder")
    ] = None
    addresses: Annotated[
        list[str], Meta(description="machines that the gateway connects to; empty: this one", max_length=1024)
    ] = []
    folder: Annotated[
        str | None, Meta(description="folder of sockets, pulses and logs; default below state_folder")
    ] = None
    device: Annotated[
        str,
        Meta(
            description="auto, cpu, cuda (all GPUs of this host) or cuda:N (that one for all)",
            pattern="^(auto|cpu|cuda|cuda:[0-9]{1,2})$",
        ),
    ] = "auto"
    threads: Annotated[_Positive | None, Meta(description="CPU threads per replica; default: shared evenly")] = None
    device_bytes: Annotated[
        _Positive | None,
        Meta(description="memory of each GPU, or of the CPU's, that replicas share; default: all that is there"),
    ] = None
    memory_bytes: Annotated[
        _Positive | None,
        Meta(description="host memory for models that sleep; default: 70 % of what is free at the start"),
    ] = None


class PriceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[models.price]: neurons per million tokens."""

    input: Annotated[float, Meta(description="neurons per million prompt tokens", ge=0)] = 1000.0
    cached_input: Annotated[
        _NotNegative | None, Meta(description="neurons per million cached prompt tokens; default: a fifth of input")
    ] = None
    output: Annotated[float, Meta(description="neurons per million completion tokens", ge=0)] = 4000.0
    batch: Annotated[float, Meta(description="what queued requests cost of these prices", ge=0, le=1)] = 0.5


_ToolFormat = Annotated[
    str,
    Meta(
        pattern="^(deepseek|deepseek_fenced|ember|hermes|kimi|llama3_json|mistral|mistral_named|pythonic|qwen_coder)$"
    ),
]
_NAME = r"^@[a-z]{2,8}(/[A-Za-z0-9][A-Za-z0-9._-]*){1,3}$"
_Alias = Annotated[
    str, Meta(pattern=r"^@?[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9][A-Za-z0-9._:-]*){0,3}$", max_length=200)
]
_Tag = Annotated[str, Meta(min_length=1, max_length=50)]


class ModelEntryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[models]]: one model that tenants may call. The same name as a known model's changes that one."""

    name: Annotated[
        str,
        Meta(description="what callers say, @cf/… or @hf/…", pattern=_NAME),
    ]
    folder: Annotated[str | None, Meta(description="Hugging Face folder; default: the built-in or pulled one")] = None
    task: Annotated[
        Literal["Text Generation", "Text Embeddings", "Text Classification"] | None,
        Meta(description="what it does; default: what its folder shows it to be made for"),
    ] = None
    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        Meta(description="how it gives vectors where callers do not say; default: as its folder says"),
    ] = None
    matryoshka: Annotated[
        bool | None, Meta(description="callers may have its vectors cut; default: as its config.json says")
    ] = None
    description: Annotated[str, Meta(description="shown by /ai/models/search", max_length=1000)] = ""
    aliases: Annotated[
        list[_Alias], Meta(description="other names that callers may say for it, such as gpt-4o-mini", max_length=16)
    ] = []
    tags: Annotated[list[_Tag], Meta(description="words beside it in /ai/models/search", max_length=16)] = []
    beta: Annotated[bool, Meta(description="an experiment, which hide_experimental leaves out of the search")] = False
    planned_deprecation_date: Annotated[
        datetime.date | None, Meta(description="a day, like 2027-01-31, from which on it is not served but 410")
    ] = None
    terms: Annotated[str, Meta(description="address of the terms of its use, shown by the search", max_length=500)] = ""
    info: Annotated[str, Meta(description="address of a page about it, shown by the search", max_length=500)] = ""
    price: Annotated[PriceConfig, Meta(description="table, neurons per million tokens")] = PriceConfig()
    dialect: Annotated[
        str,
        Meta(
            description="bodies of /ai/run: native (prompt or messages) or chat (chat completions in the envelope)",
            pattern="^(native|chat)$",
        ),
    ] = "native"
    tool_format: Annotated[
        _ToolFormat | None,
        Meta(
            description="how it writes calls of tools, a name of gateway/tool_parsers/registry.py; "
            "default: what its template shows"
        ),
    ] = None
    default_tokens: Annotated[
        int, Meta(description="output tokens where a chat completion names no max_tokens", ge=1, le=1 << 24)
    ] = 4096
    limits_class: Annotated[
        str,
        Meta(description="limits of this class of models count its calls", pattern="^[a-z0-9][a-z0-9._-]{0,31}$"),
    ] = "standard"
    serve: Annotated[bool, Meta(description="false leaves it out of the catalogue")] = True
    replicas: Annotated[int, Meta(description="copies on each machine", ge=1, le=64)] = 1
    dtype: Annotated[
        str, Meta(description="auto, float32, bfloat16 or float16", pattern="^(auto|float32|bfloat16|float16)$")
    ] = "auto"
    context_tokens: Annotated[_Context | None, Meta(description="context; default: what config.json says")] = None
    random_weights: Annotated[
        bool, Meta(description="weights made up, for measuring where only config.json is there")
    ] = False
    kv_dtype: Annotated[str, Meta(description="auto, or fp8 to halve KV on GPUs", pattern="^(auto|fp8)$")] = "auto"
    kv_bytes: Annotated[_Positive | None, Meta(description="memory for KV blocks; default: from what is left")] = None
    block_tokens: Annotated[int, Meta(description="tokens per KV block", ge=1, le=1024)] = 16
    step_tokens: Annotated[
        _StepTokens | None, Meta(description="token budget of one step; default: 512 on a CPU, by gap_ms on a GPU")
    ] = None
    gap_ms: Annotated[
        float, Meta(description="longest step that prompts may cause while others stream, on a GPU", ge=1, le=60000)
    ] = 20.0
    sequences: Annotated[
        _Sequences | None, Meta(description="sequences that run at once; default: 64 on a CPU, 512 on a GPU")
    ] = None
    waiting: Annotated[
        _Waiting | None,
        Meta(description="sequences that wait at once, above it 429; default: 1024, of texts for vectors 8192"),
    ] = None
    scope_floor_blocks: Annotated[int, Meta(description="cached blocks that others leave a tenant", ge=0)] = 0
    scope_cap_blocks: Annotated[
        _Positive | None, Meta(description="cached blocks that a tenant keeps unused at most; default: no cap")
    ] = None
    pinned: Annotated[bool, Meta(description="never leaves the device, whoever else wants its room")] = False
    priority: Annotated[
        float,
        Meta(
            description="what its waiting calls count beside other models' where there is no room for both",
            gt=0,
            le=1e6,
        ),
    ] = 1.0
    resident_s: Annotated[
        float, Meta(description="once woken it stays on the device for so long, even with nothing to do", ge=0, le=3600)
    ] = 0.2
    wake_s: Annotated[
        float,
        Meta(
            description="its calls wait so long at most for others' to end; then those are interrupted", ge=0, le=3600
        ),
    ] = 0.5
    kept_kv_bytes: Annotated[
        int, Meta(description="host memory for the KV of system prompts while it sleeps; 0: none is kept", ge=0)
    ] = 1 << 30
    public_prefixes: Annotated[
        list[str],
        Meta(description="files of system prompts that every tenant's calls may read from the cache", max_length=64),
    ] = []


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[telemetry]: traces, and the metrics at /metrics."""

    otlp_url: Annotated[
        str | None, Meta(description="OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces; default: no traces")
    ] = None
    service: Annotated[
        str, Meta(description="service.name of the traces; replicas add -replica", min_length=1, max_length=100)
    ] = "hearth"
    sample: Annotated[float, Meta(description="share of requests that are traced", ge=0, le=1)] = 1.0
    metrics_accounts: Annotated[
        int, Meta(description="accounts with series of their own; later ones are summed as other", ge=0, le=10_000)
    ] = 200


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[log]: how all processes write their logs."""

    format: Annotated[
        str,
        Meta(description="json, text for people, or auto: text on a terminal, else json", pattern="^(auto|json|text)$"),
    ] = "auto"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """hearth.toml as a whole. `load_config` makes all paths absolute."""

    state_folder: Annotated[str, Meta(description="database, credentials, secret, sockets and models")] = ".hearth"
    server: ServerConfig = ServerConfig()
    store: StoreConfig = StoreConfig()
    machine: MachineConfig = MachineConfig()
    models: Annotated[list[ModelEntryConfig], Meta(max_length=256)] = []
    issuers: Annotated[list[Issuer], Meta(max_length=64)] = []
    telemetry: TelemetryConfig = TelemetryConfig()
    log: LogConfig = LogConfig()

    @property
    def state(self) -> Path:
        return Path(self.state_folder)

    @property
    def store_url(self) -> str:
        return self.store.url or f"sqlite:{self.state / 'hearth.db'}"

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
    def run_folder(self) -> Path:
        """Where sockets live: below the state folder, or, where a socket's path would be too long, a short private
        folder of the temp dir that is the same for every process of this state folder."""
        wanted = Path(self.machine.folder) if self.machine.folder else self.state / "run"
        if len(os.fsencode(wanted)) + len(_LONGEST_SOCKET_NAME) <= SOCKET_PATH_BYTES_MAX:
            return wanted
        digest = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"hearth-{os.getuid()}-{digest}"

    @property
    def machine_address(self) -> str:
        return self.machine.address or f"unix:{self.run_folder / 'machine.sock'}"

    @property
    def machine_addresses(self) -> list[str]:
        return list(self.machine.addresses) or [self.machine_address]


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
    document = _read(file) if file.is_file() else {}
    _override(document, "server", {"host": host, "port": port})
    _override(document, "store", {"url": store_url})
    _override(document, "machine", {"device": device})
    base = file.resolve().parent
    if state_folder is not None:
        document["state_folder"] = str(Path(state_folder).resolve())
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{file.name}: {error}") from error
    _require_unique(file.name, "model", [name for model in config.models for name in (model.name, *model.aliases)])
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


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error


def _override(document: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    if overrides := {key: value for key, value in values.items() if value is not None}:
        document[section] = {**document.get(section, {}), **overrides}


def _with_prefixes(model: ModelEntryConfig, base: Path) -> ModelEntryConfig:
    paths = [str((base / path).resolve()) for path in model.public_prefixes]
    return msgspec.structs.replace(model, public_prefixes=paths)


def _absolute(config: Config, base: Path) -> Config:
    return msgspec.structs.replace(
        config,
        state_folder=str((base / config.state_folder).resolve()),
        models=[_with_prefixes(_resolved(model, base, "folder"), base) for model in config.models],
        issuers=[_resolved(issuer, base, "jwks_file", "ca_file") for issuer in config.issuers],
        machine=_resolved(config.machine, base, "folder"),
        server=_resolved(config.server, base, "certificate", "key"),
    )


def _resolved(section: _Section, base: Path, *paths: str) -> _Section:
    """The section with these paths absolute, where they are set."""
    relative = {name: path for name in paths if (path := getattr(section, name))}
    return msgspec.structs.replace(section, **{name: str((base / path).resolve()) for name, path in relative.items()})
