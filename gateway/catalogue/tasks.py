"""The task of a model's folder: text, vectors or scores of pairs; and how it computes vectors.

It reads the files that sentence-transformers puts beside config.json, and knows nothing of requests.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.protocol.types import Pooling
from gateway.catalogue.model_config import architecture_of, context_of, is_encoder, read_json
from gateway.settings.config import ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError

_SCORING: Final = "ForSequenceClassification"
_HEADLESS: Final = "Model"  # what a decoder without its head is called: LlamaModel
_POOLINGS: Final = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST}
_LEGACY: Final = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_INSTRUCTED: Final = "Instruct: "  # how a query's prompt begins where callers may say what the query is for


class ModelTask(enum.StrEnum):
    GENERATION = "Text Generation"
    EMBEDDINGS = "Text Embeddings"
    CLASSIFICATION = "Text Classification"


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """How a model computes vectors or scores.

    poolings            that callers may ask for; the first where they ask for none.
    normalized          vectors have length 1.
    dimensions          of a vector; 0 where the model scores.
    allowed_dimensions  lengths that vectors may be cut to; None: any, empty: none.
    tokens_max          of one text, control tokens included, as the folder says; a replica may take fewer.
    query               what is put before a query, and document before what it is compared with.
    """

    poolings: tuple[Pooling, ...]
    normalized: bool
    dimensions: int
    allowed_dimensions: frozenset[int] | None
    tokens_max: int
    query: str = ""
    document: str = ""

    @property
    def takes_instruction(self) -> bool:
        """Whether callers may say what their queries are for."""
        return self.query.startswith(_INSTRUCTED)

    def prompt(self, instruction: str | None) -> str:
        """The text that goes before a query with this instruction."""
        return self.query if instruction is None else f"{_INSTRUCTED}{instruction}\nQuery:"


def task_of(folder: Path, document: Mapping[str, Any], entry: ModelEntryConfig) -> ModelTask:
    """The task of hearth.toml, else that of the folder's config.json, which is `document`."""
    if entry.task is not None:
        return ModelTask(entry.task)
    architecture = architecture_of(document)
    if architecture.endswith(_SCORING):
        return ModelTask.CLASSIFICATION
    made_for_vectors = (folder / "modules.json").exists() or architecture.endswith(_HEADLESS)
    return ModelTask.EMBEDDINGS if is_encoder(document) or made_for_vectors else ModelTask.GENERATION


def read_embedding_spec(
    folder: Path, document: Mapping[str, Any], entry: ModelEntryConfig, task: ModelTask
) -> EmbeddingSpec | None:
    """How the folder's model gives vectors; None where it writes text. Raises ModelFolderError."""
    if task is ModelTask.GENERATION:
        if is_encoder(document):
            raise ModelFolderError(f"{folder} reads whole texts and writes none: its task is {ModelTask.EMBEDDINGS}")
        return None
    tokens_max = min(context_of(document), entry.context_tokens or context_of(document))
    if task is ModelTask.CLASSIFICATION:
        if not architecture_of(document).endswith(_SCORING):
            raise ModelFolderError(
                f"{folder} has no head that scores: its architectures end in {_SCORING} for this task"
            )
        return EmbeddingSpec((Pooling.SCORE,), False, 0, frozenset(), tokens_max)
    modules = _modules(folder)
    max_seq_length = read_json(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    prompts = read_json(folder / "config_sentence_transformers.json", {}).get("prompts") or {}
    return EmbeddingSpec(
        poolings=_poolings(folder, document, modules, entry),
        normalized="Normalize" in modules,
        dimensions=int(document.get("hidden_size") or 0),
        allowed_dimensions=_cuts(document, entry),
        tokens_max=min(tokens_max, int(max_seq_length)) if max_seq_length else tokens_max,
        query=str(prompts.get("query", "")),
        document=str(prompts.get("document", "")),
    )


def _modules(folder: Path) -> dict[str, str]:
    """The kinds of the folder's modules → their folders. Raises ModelFolderError for one that is not served."""
    listed = read_json(folder / "modules.json", [])
    modules = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in listed}
    foreign = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if foreign:
        raise ModelFolderError(f"{folder}: modules.json has {', '.join(sorted(foreign))}, which is not served")
    return modules


def _poolings(
    folder: Path, document: Mapping[str, Any], modules: Mapping[str, str], entry: ModelEntryConfig
) -> tuple[Pooling, ...]:
    encoder = is_encoder(document)
    served = (Pooling.MEAN, Pooling.CLS) if encoder else (Pooling.LAST,)
    default_pooling = None if entry.pooling is None else Pooling(entry.pooling)
    if default_pooling is None and "Pooling" in modules:
        config = read_json(folder / modules["Pooling"] / "config.json", {})
        modes = config.get("pooling_mode", [mode for name, mode in _LEGACY.items() if config.get(name)])
        listed = [modes] if isinstance(modes, str) else list(modes)
        if len(listed) != 1 or listed[0] not in _POOLINGS:
            raise ModelFolderError(
                f"{folder}: pooling {', '.join(map(str, listed))} is not served; mean, cls and last are"
            )
        default_pooling = _POOLINGS[listed[0]]
    default = default_pooling or served[0]
    if default not in served:
        words = " and ".join(served)
        raise ModelFolderError(f"{folder}: pooling {default} is not served for this kind of model; {words} is")
    return (default, *(pooling for pooling in served if pooling is not default))


def _cuts(document: Mapping[str, Any], entry: ModelEntryConfig) -> frozenset[int] | None:
    listed = document.get("matryoshka_dimensions")
    if entry.matryoshka is False:
        return frozenset()
    if listed:
        return frozenset(map(int, listed))
    return None if entry.matryoshka or document.get("is_matryoshka") else frozenset()
