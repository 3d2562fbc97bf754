"""Compressed safetensors files of a few tensors, written plainly, with any bases, level and choice of what is coded;
and small models to write them of."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.bf12 import metadata as bf12_metadata
from engine.bf12.codec import choose_bases, encode
from engine.bf12.layout import is_encodable
from engine.bf12.metadata import ALIGNED_BYTES, Bf12Metadata, CompressionLevel, OriginalFile, piece_rows
from engine.bf12.zstd_plane import pack_plane

_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def codable(name: str, tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16 and tensor.ndim == 2 and is_encodable(*tensor.shape)


def sums_of(content: bytes, piece_bytes: int) -> list[int]:
    starts = range(0, len(content), piece_bytes)
    return [xxhash.xxh3_64_intdigest(content[start : start + piece_bytes]) for start in starts]


def write_coded(
    path: Path, tensors: dict[str, Tensor], level: CompressionLevel = CompressionLevel.DEVICE,
    coded: Callable[[str, Tensor], bool] = codable, bases: Callable[[Tensor], Tensor] = choose_bases,
) -> None:  # fmt: skip
    planes: dict[str, Tensor] = {}
    codes: dict[str, str] = {}
    sums: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if not coded(name, tensor):
            planes[name] = tensor
            sums[name] = sums_of(raw(tensor), bf12_metadata.PIECE_BYTES)
            continue
        found = encode(tensor, bases(tensor))
        codes[name] = xxhash.xxh3_128_hexdigest(raw(tensor))
        rows = piece_rows(tensor.shape[1])
        sums[name] = sums_of(raw(found.words_NW), rows * found.words_NW[0].nbytes)
        planes[name] = found.words_NW
        if level is CompressionLevel.DISTRIBUTION:
            packed = [pack_plane(part.contiguous()) for part in found.words_NW.split(rows)]
            frames = b"".join(frame for frame, _ in packed)
            planes[name] = torch.cat([low_NV for _, low_NV in packed])
            planes[name + ".high_ends"] = torch.tensor([len(frame) for frame, _ in packed]).cumsum(0)
            planes[name + ".high"] = torch.tensor(list(frames + bytes(-len(frames) % ALIGNED_BYTES)), dtype=torch.uint8)
        escapes = found.escapes
        small = {"bases": escapes.bases_N, "escape_positions": escapes.positions_E, "escape_values": escapes.values_E}
        for plane, values in small.items():
            planes[f"{name}.{plane}"] = values
            sums[f"{name}.{plane}"] = sums_of(raw(values), bf12_metadata.PIECE_BYTES)
    header, content = header_and_content(tensors)
    original = OriginalFile(header=header.decode(), bytes=8 + len(header) + len(content), xxh3_128="")
    write_file(
        path, planes, bf12_metadata.encode_metadata(Bf12Metadata(bf12_metadata.VERSION, level, original, codes, sums))
    )


def write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    header, content = header_and_content(tensors, {"__metadata__": metadata})
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


def header_and_content(tensors: dict[str, Tensor], header: dict[str, Any] | None = None) -> tuple[bytes, bytes]:
    """The largest items first, so that all are aligned."""
    header = header or {}
    content = b""
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        first = len(content)
        content += raw(tensor)
        header[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, len(content)],
        }  # fmt: skip
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return encoded, content


def compressed(source: Path, target: Path, level: CompressionLevel, **options: Any) -> Path:
    """The folder again, its safetensors files compressed."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            write_coded(target / file.name, load_file(file), level, **options)
        elif file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    return target


def small_llama(folder: Path, tied: bool = False, shard: str = "1GB", **changes: Any) -> Path:
    """A random bf16 model, all of whose matrices can be coded."""
    sizes = {
        "vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": None, "initializer_range": 0.05,
    }  # fmt: skip
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes), tie_word_embeddings=tied)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
