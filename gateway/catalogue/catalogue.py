"""The models that tenants may call: the built-in one, pulled and added ones and those of hearth.toml, with their texts
and prices. It reads folders, writes which were added, and knows nothing of replicas or requests."""

import importlib.resources
import json
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.process.files import replace_file
from engine.protocol.specs import ModelSpec
from gateway.catalogue.bf12_size import read_bf12_size
from gateway.catalogue.model_config import context_of, read_model_config
from gateway.catalogue.public_prefixes import public_prefixes
from gateway.catalogue.tasks import EmbeddingSpec, ModelTask, read_embedding_spec, task_of
from gateway.config import Config, ModelEntryConfig, SettingsError
from gateway.text.tokenizer import ModelFolderError, ModelTokenizer
from gateway.tool_parsers.reasoning import template_has_reasoning
from gateway.tool_parsers.registry import TOOL_FORMATS, tool_format_of
from gateway.tool_parsers.tool_format import ToolFormat
from tenants.limits.reservation import NeuronPrice

BUILT_IN: Final = "@cf/hearth/ember"
_BUILT_IN_DESCRIPTION: Final = (
    "The built-in model: a small Llama that answers from the facts in its system prompt, calls tools and writes JSON."
)
_WAITING, _TEXTS_WAITING = 1024, 8192  # a request for vectors has many texts
_NAMESPACE: Final = uuid.UUID("5b0d6e1c-6f3e-4f0b-9d3a-1f5f3c1f9a10")


@dataclass(frozen=True, slots=True)
class Model:
    """One catalogue entry. `context_tokens` is what its folder says: a replica's Hello has the last word. From the day
    `ends_on` on, in UTC, it is not served. `tool_format` is how it writes calls of tools, None where that is unknown;
    `has_reasoning`: it may reason before it answers a chat."""

    name: str
    settings: ModelEntryConfig
    task: ModelTask
    embedding_spec: EmbeddingSpec | None
    folder: Path
    price: NeuronPrice
    context_tokens: int
    vocabulary: int
    created_at: float
    tokenizer: ModelTokenizer
    tool_format: ToolFormat | None
    has_reasoning: bool
    spec: ModelSpec

    @property
    def id(self) -> str:
        """A UUID that is the same wherever and whenever this name is served."""
        return str(uuid.uuid5(_NAMESPACE, self.name))

    @property
    def author(self) -> str:
        """`@cf/hearth/ember` → `hearth`."""
        return self.name.split("/")[1]

    @property
    def created(self) -> datetime:
        return datetime.fromtimestamp(int(self.created_at), UTC)

    @property
    def ends_on(self) -> date | None:
        return self.settings.planned_deprecation_date

    def ended(self, today: date) -> bool:
        return self.ends_on is not None and today >= self.ends_on

    @property
    def run_family(self) -> str:
        """The family of its bodies at `/ai/run`."""
        return {ModelTask.EMBEDDINGS: "embeddings", ModelTask.CLASSIFICATION: "rerank"}.get(
            self.task, self.settings.dialect
        )

    @property
    def batch_price(self) -> NeuronPrice:
        """The price of batch items, which run on spare capacity."""
        return self.price.times(self.settings.price.batch)

    @property
    def function_calling(self) -> bool:
        return self.tool_format is not None and self.tokenizer.supports_tools


class Catalogue:
    """Models by name, frozen at start. `problems` says which entries are not served, and why."""

    def __init__(self, models: list[Model], problems: dict[str, str]) -> None:
        self._models = {model.name: model for model in models}
        self._by_any_name = {name: model for model in models for name in (*model.settings.aliases, model.name)}
        self.problems = problems

    def find(self, name: str) -> Model | None:
        """Finds a model by its name or an alias."""
        return self._by_any_name.get(name)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())


def open_catalogue(config: Config) -> Catalogue:
    """Reads every entry's folder: about 50 ms for each 100,000 entries of vocabulary. A broken folder leaves its
    model out and goes into `problems`; only a wrong price, which the operator wrote, raises SettingsError."""
    models, problems = [], {}
    for entry in model_entries(config):
        try:
            models.append(_open(config, entry))
        except ModelFolderError as error:
            problems[entry.name] = str(error)
    return Catalogue(models, problems)


def model_entries(config: Config) -> list[ModelEntryConfig]:
    """All entries that are served, without opening them."""
    return [entry for entry in known_models(config) if entry.serve]


def known_models(config: Config) -> list[ModelEntryConfig]:
    """The built-in model, what was pulled, what `hearth models add` added, and what hearth.toml adds or changes; of an
    added one it may leave the folder out. Raises SettingsError."""
    entries = {entry.name: entry for entry in config.models}
    built_in = ModelEntryConfig(name=BUILT_IN, description=_BUILT_IN_DESCRIPTION)
    pulled = [ModelEntryConfig(name=name) for name in pulled_models(config)]
    known = {entry.name: entry for entry in (built_in, *pulled, *registered_models(config))}
    for name in known.keys() & entries.keys():
        folder = entries[name].folder or known[name].folder
        known[name] = msgspec.structs.replace(entries[name], folder=folder)
    return [*known.values(), *(entry for name, entry in entries.items() if name not in known)]


def folder_of(config: Config, entry: ModelEntryConfig) -> Path:
    """The folder of an entry's files, which need not exist."""
    if entry.folder is not None:
        return Path(entry.folder)
    if entry.name == BUILT_IN:
        return Path(str(importlib.resources.files("engine") / "builtin_model"))
    return pulled_folder(config, entry.name)


def pulled_folder(config: Config, name: str) -> Path:
    """`@hf/org/name` → models/org/name."""
    return config.models_folder.joinpath(*name.split("/")[1:])


def pulled_models(config: Config) -> list[str]:
    """Names of the models that `hearth pull` brought here and finished."""
    folders = sorted(path.parent for path in config.models_folder.glob("*/*/config.json"))
    return [f"@hf/{folder.parent.name}/{folder.name}" for folder in folders]


def spec_of(config: Config, entry: ModelEntryConfig) -> ModelSpec:
    """The entry as a machine gets it. Reads the model's tokenizer only where prefixes are published."""
    folder, paths = folder_of(config, entry), entry.public_prefixes
    task = _task(folder, entry)
    waiting = entry.waiting or (_WAITING if task is ModelTask.GENERATION else _TEXTS_WAITING)
    sizes = msgspec.structs.replace(entry, folder=str(folder), waiting=waiting, public_prefixes=[])
    return msgspec.structs.replace(
        msgspec.convert(sizes, ModelSpec, from_attributes=True),  # fields of the same name mean the same
        vectors=task is ModelTask.EMBEDDINGS,
        weights_bytes=_weights_bytes(config, folder),
        public_prefixes=_published(folder, paths, entry.name) if paths else [],
    )


def _weights_bytes(config: Config, folder: Path) -> int:
    """The size of its files: about that of its weights, until its replica reports the exact one."""
    if (compressed := read_bf12_size(folder)) is not None:
        return compressed.original_bytes if config.machine.device == "cpu" else compressed.coded_bytes
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _task(folder: Path, entry: ModelEntryConfig) -> ModelTask:
    """The folder's task; text generation where it cannot be read, for its replica reports what is wrong."""
    try:
        return task_of(folder, read_model_config(folder), entry)
    except ModelFolderError:
        return ModelTask.GENERATION


def _published(folder: Path, paths: list[str], model: str) -> list[list[int]]:
    try:
        return public_prefixes(ModelTokenizer(folder), paths, model)
    except ModelFolderError as error:
        raise SettingsError(f"public_prefixes of {model}: {error}") from error


def price_of(entry: ModelEntryConfig) -> NeuronPrice:
    """Raises SettingsError where a cached token would cost more than a fresh one."""
    price = entry.price
    cached = price.input / 5 if price.cached_input is None else price.cached_input
    try:
        return NeuronPrice(price.input, cached, price.output)
    except ValueError as error:
        raise SettingsError(f"models.price of {entry.name}: {error}") from error


def _open(config: Config, entry: ModelEntryConfig) -> Model:
    folder = folder_of(config, entry)
    document = read_model_config(folder)
    context, task = context_of(document), task_of(folder, document, entry)
    text = ModelTokenizer(folder)
    if entry.tool_format is None:
        tool_format = tool_format_of(text.template, text.added_tokens)
    else:
        tool_format = TOOL_FORMATS[entry.tool_format].with_tokens(text.added_tokens)
    return Model(
        name=entry.name,
        settings=entry,
        task=task,
        embedding_spec=read_embedding_spec(folder, document, entry, task),
        folder=folder,
        price=price_of(entry),
        context_tokens=min(context, entry.context_tokens or context),
        vocabulary=int(document.get("vocab_size") or 0),
        created_at=(folder / "config.json").stat().st_mtime,
        tokenizer=text,
        tool_format=tool_format,
        has_reasoning=template_has_reasoning(text.template),
        spec=spec_of(config, entry),
    )


# Models that `hearth models add` added: one TOML file each below the state folder, with the settings that it would have
# in [[models]]. What a folder must hold was looked at before.


def registered_models(config: Config) -> list[ModelEntryConfig]:
    """The registered models, by name. Raises SettingsError for a file that cannot be read."""
    return [_read_registration(path) for path in sorted(config.added_folder.glob("**/*.toml"))]


def save_registration(config: Config, settings: dict[str, Any]) -> None:
    """Writes the settings of an entry, `name` and `folder` among them, atomically. `parse_registration` reads them."""
    path = _registration_path(config, settings["name"])
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # JSON writes these values as TOML does, but for one character.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items()]
    replace_file(path, "".join(lines).replace("\x7f", "\\u007f").encode())


def remove_registration(config: Config, entry: ModelEntryConfig) -> None:
    """Removes an entry, which may be gone already. The model's files stay where they are."""
    _registration_path(config, entry.name).unlink(missing_ok=True)


def parse_registration(settings: dict[str, Any], where: object) -> ModelEntryConfig:
    """Reads settings, also numbers that are written as text. Raises SettingsError, which names `where`."""
    try:
        return msgspec.convert(settings, ModelEntryConfig, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error


def _read_registration(path: Path) -> ModelEntryConfig:
    try:
        return parse_registration(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as TOML: {error}; `hearth models add` writes it anew") from error


def _registration_path(config: Config, name: str) -> Path:
    """`@cf/acme/assistant` → added/@cf/acme/assistant.toml."""
    return config.added_folder / f"{name}.toml"
