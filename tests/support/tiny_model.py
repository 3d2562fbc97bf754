"""A whole model of 280 KiB: a Llama with random weights and the built-in model's tokenizer."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.model_folders import EMBER

HIDDEN, INNER, LAYERS = 16, 32, 2


def write_tiny(folder: Path) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBER / name, folder)
    vocabulary = json.loads((EMBER / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(vocabulary), folder / "model.safetensors")
    return folder


def tensors(vocabulary: int) -> dict[str, np.ndarray]:
    """By the names and with the shapes that its config.json means, the vocabulary apart."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        ours = {
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
            "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in ours.items()}
    draw = np.random.default_rng(0)
    return {name: draw.normal(0.0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
