"""What folders say that their models do, and how they give vectors."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.types import Pooling
from gateway.catalogue.model_config import context_of
from gateway.catalogue.tasks import ModelTask, read_embedding_spec, task_of
from gateway.settings.config import ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError
from tests.support import minilm

BERT = {"architectures": ["BertModel"], "hidden_size": 32, "max_position_embeddings": 512}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "max_position_embeddings": 4096}
MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def entry(**said: Any) -> ModelEntryConfig:
    return ModelEntryConfig(name="@cf/test/model", **said)


def written(folder: Path, **files: Any) -> Path:
    """A folder with these files; double underscores are slashes."""
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", ModelTask.GENERATION),
        ("Qwen3ForCausalLM", ModelTask.GENERATION),
        ("Qwen3Model", ModelTask.EMBEDDINGS),
        ("BertModel", ModelTask.EMBEDDINGS),
        ("BertForMaskedLM", ModelTask.EMBEDDINGS),
        ("XLMRobertaModel", ModelTask.EMBEDDINGS),
        ("RobertaModel", ModelTask.EMBEDDINGS),
        ("XLMRobertaForSequenceClassification", ModelTask.CLASSIFICATION),
        ("BertForSequenceClassification", ModelTask.CLASSIFICATION),
    ],
)
def test_the_architecture_says_what_a_model_does(architecture: str, task: ModelTask, tmp_path: Path) -> None:
    assert task_of(tmp_path, {"architectures": [architecture]}, entry()) is task


def test_a_decoder_with_modules_of_sentence_transformers_gives_vectors(tmp_path: Path) -> None:
    written(tmp_path, modules=MODULES, **{"1_Pooling__config": {"pooling_mode_lasttoken": True}})
    assert task_of(tmp_path, QWEN, entry()) is ModelTask.EMBEDDINGS
    vectors = read_embedding_spec(tmp_path, QWEN, entry(), ModelTask.EMBEDDINGS)
    assert vectors is not None
    assert vectors.poolings == (Pooling.LAST,)
    assert vectors.normalized


def test_the_operators_word_has_precedence(tmp_path: Path) -> None:
    assert task_of(tmp_path, BERT, entry(task="Text Generation")) is ModelTask.GENERATION
    vectors = read_embedding_spec(tmp_path, BERT, entry(pooling="cls", context_tokens=100), ModelTask.EMBEDDINGS)
    assert vectors is not None
    assert vectors.poolings == (Pooling.CLS, Pooling.MEAN)
    assert vectors.tokens_max == 100


def test_models_of_text_give_no_vectors_and_encoders_no_text(tmp_path: Path) -> None:
    assert read_embedding_spec(tmp_path, QWEN, entry(), ModelTask.GENERATION) is None
    with pytest.raises(ModelFolderError, match="its task is Text Embeddings"):
        read_embedding_spec(tmp_path, BERT, entry(task="Text Generation"), ModelTask.GENERATION)


def test_minilm_is_read_as_it_is() -> None:
    folder = minilm.folder()
    document = json.loads((folder / "config.json").read_text())
    vectors = read_embedding_spec(folder, document, entry(), task_of(folder, document, entry()))
    assert vectors is not None
    assert (vectors.poolings[0], vectors.normalized, vectors.dimensions) == (Pooling.MEAN, True, 384)
    assert vectors.tokens_max == 256
    assert vectors.allowed_dimensions == frozenset()


@pytest.mark.parametrize(
    "config", [{"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, {"pooling_mode": "cls"}]
)
def test_both_ways_of_writing_a_pooling_are_read(config: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, modules=MODULES[:2], **{"1_Pooling__config": config})
    vectors = read_embedding_spec(tmp_path, BERT, entry(), ModelTask.EMBEDDINGS)
    assert vectors is not None
    assert vectors.poolings == (Pooling.CLS, Pooling.MEAN)
    assert not vectors.normalized


@pytest.mark.parametrize(
    ("document", "config", "message"),
    [
        (BERT, {"pooling_mode_max_tokens": True}, "pooling max is not served"),
        (BERT, {"pooling_mode": ["cls", "mean"]}, "pooling cls, mean is not served"),
        (BERT, {"pooling_mode": "lasttoken"}, "pooling last is not served for this kind"),
        (QWEN, {"pooling_mode": "mean"}, "pooling mean is not served for this kind"),
    ],
)
def test_a_pooling_that_is_not_served_leaves_the_model_out(
    document: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(tmp_path, modules=MODULES, **{"1_Pooling__config": config})
    with pytest.raises(ModelFolderError, match=message):
        read_embedding_spec(tmp_path, document, entry(), ModelTask.EMBEDDINGS)


def test_a_module_that_is_not_served_leaves_the_model_out(tmp_path: Path) -> None:
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    written(tmp_path, modules=[*MODULES[:2], dense], **{"1_Pooling__config": {"pooling_mode": "mean"}})
    with pytest.raises(ModelFolderError, match="Dense"):
        read_embedding_spec(tmp_path, BERT, entry(), ModelTask.EMBEDDINGS)


def test_a_model_without_a_head_that_scores_cannot_be_a_reranker(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="ForSequenceClassification"):
        read_embedding_spec(tmp_path, BERT, entry(), ModelTask.CLASSIFICATION)


def test_prompts_are_read_and_instructions_known_where_there_is_a_place_for_them(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: Find\nQuery:", "document": "passage: "}
    written(tmp_path, config_sentence_transformers={"prompts": prompts})
    vectors = read_embedding_spec(tmp_path, QWEN, entry(), ModelTask.EMBEDDINGS)
    assert vectors is not None
    assert vectors.prompt(None) == "Instruct: Find\nQuery:"
    assert vectors.prompt("Look") == "Instruct: Look\nQuery:"
    assert vectors.document == "passage: "
    plain = read_embedding_spec(tmp_path / "none", QWEN, entry(), ModelTask.EMBEDDINGS)
    assert plain is not None
    assert not plain.takes_instruction


@pytest.mark.parametrize(
    ("said", "matryoshka", "cuts"),
    [
        ({}, None, frozenset()),
        ({}, True, None),
        ({"is_matryoshka": True}, None, None),
        ({"matryoshka_dimensions": [8, 16]}, None, frozenset({8, 16})),
        ({"matryoshka_dimensions": [8, 16]}, False, frozenset()),
    ],
)
def test_vectors_may_be_cut_where_config_or_operator_say_so(
    said: dict[str, Any], matryoshka: bool | None, cuts: frozenset[int] | None, tmp_path: Path
) -> None:
    vectors = read_embedding_spec(tmp_path, {**BERT, **said}, entry(matryoshka=matryoshka), ModelTask.EMBEDDINGS)
    assert vectors is not None
    assert vectors.allowed_dimensions == cuts


def test_robertas_positions_begin_behind_its_padding() -> None:
    assert context_of({"architectures": ["XLMRobertaModel"], "max_position_embeddings": 514, "pad_token_id": 1}) == 512
    assert context_of(BERT) == 512
