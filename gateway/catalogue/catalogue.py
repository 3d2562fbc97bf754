"""The models that tenants may call: the built-in one, pulled and added ones and those of hearth.toml, with their texts
and prices. It reads folders, and knows nothing of replicas or requests."""

import importlib.resources
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engine.process.files import fingerprint
from engine.protocol.specs import ModelSpec
from gateway.catalogue.manifest import READ_FILES
from gateway.catalogue.model_config import (
    context_of,
    geometry_of,
    is_encoder,
    read_json,
    read_model_config,
    read_sampling,
    weights_bytes,
)
from gateway.catalogue.names import ModelNames
from gateway.catalogue.public_prefixes import public_prefixes
from gateway.catalogue.registrations import Registration, registrations
from gateway.catalogue.tasks import EmbeddingSpec, ModelTask, read_embedding_spec, task_of
from gateway.images.vision import Vision, read_vision
from gateway.settings.config import Config, ModelEntryConfig, SettingsError
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
    `has_reasoning`: it may reason before it answers a chat. `vision`: how it takes images, None where it takes none.
    `sampling` are its own parameters for calls that do not say them. `edition` differs where a file of its folder
    does."""

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
    vision: Vision | None
    sampling: Mapping[str, float]
    spec: ModelSpec
    edition: str

    @property
    def id(self) -> str:
        """A UUID that is the same wherever and whenever this name is served."""
        return str(uuid.uuid5(_NAMESPACE, self.name))

    @property
    def author(self) -> str:
        """`@cf/hearth/ember` → `hearth`, `Qwen/Qwen3-0.6B` → `Qwen`; of a name without one the name."""
        return self.name.split("/")[1 if self.name.startswith("@") else 0]

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


class UnknownModel(LookupError):
    """No model has this name, or more than one may be meant by it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Contents(NamedTuple):
    models: dict[str, Model]
    names: ModelNames
    problems: dict[str, str]


class Catalogue:
    """Models by name. What it holds changes as a whole and at once; a Model never changes, so that whoever has found
    one goes on with it. `problems` says which entries are not served, and why."""

    def __init__(self, models: Iterable[Model], problems: Mapping[str, str]) -> None:
        self.replace(models, problems)

    def replace(self, models: Iterable[Model], problems: Mapping[str, str]) -> None:
        """Holds these models from now on, and no others."""
        by_name = {model.name: model for model in models}
        names = ModelNames({name: model.settings.aliases for name, model in by_name.items()})
        self._now = _Contents(by_name, names, dict(problems))

    @property
    def problems(self) -> dict[str, str]:
        return self._now.problems

    @property
    def names(self) -> list[str]:
        return list(self._now.models)

    def find(self, name: str) -> Model | None:
        """Finds a model by its name, an alias, or the end of its name that no other has: `ember`."""
        now = self._now
        whole = now.names.find(name)
        return None if whole is None else now.models[whole]

    def get(self, name: str) -> Model:
        """Finds a model as `find` does. Raises UnknownModel."""
        model = self.find(name)
        if model is None:
            raise UnknownModel(name)
        return model

    def did_you_mean(self, name: str, permitted: Callable[[str], bool]) -> str:
        """`; did you mean …?`, as an error about a name that finds nothing goes on; empty where nothing is alike. It
        names none but models that are `permitted` by their whole names."""
        names = " or ".join(self._now.names.suggest(name, permitted))
        return f"; did you mean {names}?" if names else ""

    def __iter__(self) -> Iterator[Model]:
        return iter(self._now.models.values())


def open_catalogue(config: Config, known: Iterable[Model] = ()) -> Catalogue:
    """Reads every entry's folder once: about 50 ms for each 100,000 entries of vocabulary; nothing of a folder that is
    as it was for a `known` model. A broken folder leaves its model out and goes into `problems`; what the operator
    wrote wrong raises SettingsError."""
    models, problems = [], {}
    before = {model.name: model for model in known}
    tokenizers = {model.edition: model.tokenizer for model in before.values()}
    for entry in model_entries(config):
        try:
            models.append(_open(config, entry, before.get(entry.name), tokenizers))
        except ModelFolderError as error:
            problems[entry.name] = str(error)
    return Catalogue(models, problems)


def model_entries(config: Config) -> list[ModelEntryConfig]:
    """All entries that are served, without opening them. Raises SettingsError."""
    entries = [entry for entry in known_models(config) if entry.serve]
    owners: dict[str, str] = {entry.name: entry.name for entry in entries}
    for entry in entries:
        for alias in entry.aliases:
            if (owner := owners.setdefault(alias, entry.name)) != entry.name:
                raise SettingsError(f"the alias {alias} of {entry.name} is a name of {owner}: choose one that is free")
    return entries


def known_models(config: Config, changed: Registration | None = None) -> list[ModelEntryConfig]:
    """The built-in model, what was pulled, and what `hearth models add` and `set` added or changed; then what
    hearth.toml adds or has other settings for, of which it may leave out where the folder is. `changed` stands for the
    registration of its model. Raises SettingsError."""
    pulled = [ModelEntryConfig(name=name) for name in pulled_models(config)]
    built_in = ModelEntryConfig(name=BUILT_IN, description=_BUILT_IN_DESCRIPTION)
    known = {entry.name: entry for entry in (built_in, *pulled)}
    registered = {each.settings["name"]: each for each in registrations(config)}
    for name, each in {**registered, **({changed.settings["name"]: changed} if changed is not None else {})}.items():
        if (
            name in known or "folder" in each.settings or each.path != config.cluster.mirror_path(config.state)
        ):  # else others have it
            known[name] = each.over(known.get(name))
    entries = {entry.name: entry for entry in config.models}
    for name in known.keys() & entries.keys():
        known[name] = msgspec.structs.replace(entries[name], folder=entries[name].folder or known[name].folder)
    return [*known.values(), *(entry for name, entry in entries.items() if name not in known)]


def folder_of(config: Config, entry: ModelEntryConfig) -> Path:
    """The folder of an entry's files, which need not exist."""
    if entry.folder is not None:
        return Path(entry.folder)
    if entry.name == BUILT_IN:
        return Path(str(importlib.resources.files("engine") / "builtin_model"))
    return pulled_folder(config, entry.name)


def awaits_weights(config: Config, entry: ModelEntryConfig) -> bool:
    """Whether this host has of a cluster's model only what a gateway reads, so that no replica can load it here."""
    folder = folder_of(config, entry)
    return folder.parent == config.cluster.models_folder(config.state) and not any(folder.glob("*.safetensors"))


def pulled_folder(config: Config, name: str) -> Path:
    """`@hf/org/name` → models/org/name."""
    return config.models_folder.joinpath(*name.split("/")[1:])


def pulled_models(config: Config) -> list[str]:
    """Names of the models that `hearth pull` brought here and finished."""
    folders = sorted(path.parent for path in config.models_folder.glob("*/*/config.json"))
    whole = [folder for folder in folders if not folder.parent.name.startswith(".")]  # others are on their way
    return [f"@hf/{folder.parent.name}/{folder.name}" for folder in whole]


def spec_of(config: Config, entry: ModelEntryConfig) -> ModelSpec:
    """The entry as a machine gets it. Reads the model's tokenizer only where prefixes are published."""
    folder, paths = folder_of(config, entry), entry.public_prefixes
    task = _task(folder, entry)
    waiting = entry.waiting or (_WAITING if task is ModelTask.GENERATION else _TEXTS_WAITING)
    gpus, stages = (0 if count == "auto" else count for count in (entry.gpus, entry.stages))
    if entry.prefill_replicas and not entry.handover_bytes:
        problem = "prompts are computed for other replicas only where these take KV in: set handover_bytes too"
        raise SettingsError(f"models.prefill_replicas of {entry.name}: {problem}")
    sizes = msgspec.structs.replace(
        entry, folder=str(folder), waiting=waiting, public_prefixes=[], gpus=gpus, stages=stages
    )
    return msgspec.structs.replace(
        msgspec.convert(sizes, ModelSpec, from_attributes=True),  # fields of the same name mean the same
        vectors=task is ModelTask.EMBEDDINGS,
        weights_bytes=weights_bytes(folder, on_cpu=config.machine.device == "cpu"),
        public_prefixes=_published(folder, paths, entry.name) if paths else [],
        disk_kv_folder=str(config.kv_folder) if entry.disk_kv_bytes else "",
        **_cut_sizes(folder, entry),
    )


def _cut_sizes(folder: Path, entry: ModelEntryConfig) -> dict[str, int]:
    """Fields of a ModelSpec: bytes of the KV of one context, and what says into what the model divides; none where its
    folder does not say."""
    try:
        document = read_model_config(folder)
        if is_encoder(document):
            return {}
        geometry, context = geometry_of(document), context_of(document)
        tokens, number_bytes = min(context, entry.context_tokens or context), 1 if entry.kv_dtype == "fp8" else 2
        return {
            "context_kv_bytes": geometry.kv_numbers(tokens) * number_bytes,
            "most_ranks": geometry.most_ranks(document),
            "layers": geometry.layers,
            "hidden": int(document.get("hidden_size", 0)),
        }
    except ModelFolderError:
        return {}


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


def read_files(folder: Path) -> list[Path]:
    """The files of a folder that a Model is made from, whether they are there or not."""
    return [folder / name for name in READ_FILES]


def _open(config: Config, entry: ModelEntryConfig, known: Model | None, tokenizers: dict[str, ModelTokenizer]) -> Model:
    folder = folder_of(config, entry)
    edition = fingerprint(read_files(folder))
    if known is not None and (known.settings, known.edition) == (entry, edition) and not entry.public_prefixes:
        return known
    document = read_model_config(folder)
    context, task = context_of(document), task_of(folder, document, entry)
    if (text := tokenizers.get(edition)) is None:
        text = tokenizers[edition] = ModelTokenizer(folder)
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
        vision=read_vision(folder, document, text.added_tokens, read_json),
        sampling=read_sampling(folder),
        spec=spec_of(config, entry),
        edition=edition,
    )
