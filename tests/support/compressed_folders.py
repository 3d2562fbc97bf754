"""Folders of safetensors files as models have them and as nobody should, written by hand, byte for byte."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.engine.bf12.test_codec import gaussian

NAMES = {
    "BOOL": torch.bool, "U8": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32,
    "I64": torch.int64,
}  # fmt: skip
_DTYPES = {dtype: name for name, dtype in NAMES.items()}


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: object = None, blanks: int = 0, turned: bool = False
) -> None:
    """The header has the names in their order, or turned around, and ends with blanks; the data are in their order."""
    entries: dict[str, object] = {}
    content = b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        places = [len(content), len(content) + len(data)]
        entries[name] = {"shape": list(tensor.shape), "dtype": _DTYPES[tensor.dtype], "data_offsets": places}
        content += data
    if turned:
        entries = dict(reversed(entries.items()))
    if metadata is not None:
        entries["__metadata__"] = metadata
    text = json.dumps(entries, indent=1 if turned else None).encode() + b" " * blanks
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def write_folder(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """One file, and a config.json of no architecture."""
    folder.mkdir(parents=True)
    write_file(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text('{"architectures": ["Nobody"]}')
    return folder


def with_bits(weight_NK: Tensor, bits: Mapping[int, int]) -> Tensor:
    """The same matrix with these 16 bits at these positions."""
    weight_NK = weight_NK.clone()
    flat = weight_NK.view(-1).view(torch.int16)
    for position, number in bits.items():
        flat[position] = number if number < 1 << 15 else number - (1 << 16)
    return weight_NK


def llama_tensors(hidden: int = 128, inner: int = 256, layers: int = 2, vocabulary: int = 256) -> dict[str, Tensor]:
    """By the names of a small Llama's, in the order that files have."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        own = {
            "input_layernorm": (hidden,), "mlp.down_proj": (hidden, inner), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "post_attention_layernorm": (hidden,),
            "self_attn.k_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
            "self_attn.q_proj": (hidden, hidden), "self_attn.v_proj": (hidden // 2, hidden),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (hidden,)
    return {
        name: gaussian(*shape, seed=seed) if len(shape) == 2 else torch.ones(shape, dtype=torch.bfloat16)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def llama_config(hidden: int = 128, inner: int = 256, layers: int = 2, vocabulary: int = 256) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
