"""Small random encoders of each family, made with the reference library, and what it says of a text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

from engine.execution.open import open_model
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling
from engine.step.encoder_layout import pack_texts
from engine.step.executor import LoadedModel

VOCABULARY = 160
POSITIONS = 300
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": POSITIONS,
}
_BEHIND_PADDING = {**_SIZES, "pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": POSITIONS + 2}
_ONE = {"num_labels": 1}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: AutoModel.from_config(BertConfig(**_SIZES)),
    "bert tanh": lambda: AutoModel.from_config(BertConfig(**_SIZES, hidden_act="gelu_new", layer_norm_eps=1e-5)),
    "bert masked": lambda: AutoModelForMaskedLM.from_config(BertConfig(**_SIZES)),
    "roberta": lambda: AutoModel.from_config(RobertaConfig(**_BEHIND_PADDING)),
    "xlm-roberta": lambda: AutoModel.from_config(XLMRobertaConfig(**_BEHIND_PADDING, hidden_act="gelu")),
    "xlm-roberta relu": lambda: AutoModelForMaskedLM.from_config(
        XLMRobertaConfig(**_BEHIND_PADDING, hidden_act="relu")
    ),
}
RERANKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: AutoModelForSequenceClassification.from_config(BertConfig(**_SIZES, **_ONE)),
    "roberta": lambda: AutoModelForSequenceClassification.from_config(RobertaConfig(**_BEHIND_PADDING, **_ONE)),
    "xlm-roberta": lambda: AutoModelForSequenceClassification.from_config(XLMRobertaConfig(**_BEHIND_PADDING, **_ONE)),
}


def seeded(make: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """With random weights, biases and norms included, in float32."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.normal_(1, 0.2)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def open_encoder(folder: Path, **changes: Any) -> LoadedModel:
    spec = ModelSpec(**({"name": "small", "folder": str(folder)} | changes))
    return open_model(spec, "cpu", 1, lambda: None)


def vectors(runner: LoadedModel, texts: Sequence[Sequence[int]], pooling: Pooling | Sequence[Pooling]) -> NDArray[Any]:
    """All of them in one step."""
    poolings = [pooling] * len(texts) if isinstance(pooling, Pooling) else pooling
    found = runner.executor.launch(pack_texts(texts, poolings)).wait().vectors_RH
    assert found is not None
    return found


@torch.inference_mode()
def reference(model: PreTrainedModel, tokens: Sequence[int], pooling: Pooling) -> Tensor:
    """One text alone, as the reference library computes it."""
    body = getattr(model, model.base_model_prefix, model)
    states = body(torch.tensor([tokens])).last_hidden_state[0]
    return states.mean(0) if pooling is Pooling.MEAN else states[0]


@torch.inference_mode()
def reference_score(model: PreTrainedModel, tokens: Sequence[int], types: Sequence[int]) -> float:
    return float(model(torch.tensor([tokens]), token_type_ids=torch.tensor([types])).logits[0, 0])
