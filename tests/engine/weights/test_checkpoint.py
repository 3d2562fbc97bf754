"""engine/weights/checkpoint.py: what a folder holds is known before it is used, and a bad folder is refused."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.config import read_decoder_config
from engine.models.weight_names import decoder_entries, is_unused_tensor
from engine.weights.checkpoint import Checkpoint, CheckpointError
from tests.support.small_models import reference_model, saved

FAMILY = "llama 3.2 tied"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(reference_model(FAMILY), tmp_path)


def checked(folder: Path) -> Checkpoint:
    checkpoint, config = Checkpoint(folder), read_decoder_config(folder)
    checkpoint.require(decoder_entries(config), lambda name: is_unused_tensor(config, name))
    return checkpoint


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    def forget(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    rewrite(folder, forget)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        checked(folder)


def test_a_tensor_without_a_place_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.9.extra": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.9\.extra"):
        checked(folder)


def test_a_wrong_shape_is_named_with_both(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[63\], config\.json means \[64\]"):
        checked(folder)


def test_a_dtype_that_is_no_weight_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype I32"):
        checked(folder)


def reheader(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


def shift(header: dict[str, Any]) -> None:
    entry = header["model.norm.weight"]
    entry["data_offsets"] = [offset - 4 for offset in entry["data_offsets"]]


def grow(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [65]


def negative(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [-64]


def malformed(header: dict[str, Any]) -> None:
    header["model.norm.weight"] = {"dtype": "F32", "shape": [64]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shift, r"model\.norm\.weight is to lie from byte"),
        (grow, r"model\.norm\.weight .* does not fit"),
        (negative, r"model\.norm\.weight has the shape \[-64\]"),
        (malformed, r"its entry of model\.norm\.weight is malformed"),
    ],
)
def test_offsets_that_overlap_or_do_not_fit_are_refused(folder: Path, change: Any, said: str) -> None:
    reheader(folder, change)
    with pytest.raises(CheckpointError, match=said):
        checked(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: content[:-10], "cut short"),
        (lambda content: content + b"more", "added to"),
        (lambda content: struct.pack("<Q", 1 << 60) + content[8:], "no safetensors file"),
        (lambda content: content[:8] + b"[" + content[9:], "no safetensors file"),
        (lambda content: b"", "no safetensors file"),
        (lambda content: struct.pack("<Q", 100_000) + b"[" * 100_000, "no safetensors file"),
    ],
)
def test_a_damaged_file_is_refused(folder: Path, spoil: Callable[[bytes], bytes], said: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CheckpointError, match=said):
        checked(folder)


def test_an_index_may_not_name_files_elsewhere(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no file of"):
        checked(folder)


def test_a_folder_without_weights_is_a_clear_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        checked(folder)


def test_revision_changes_with_one_weight_and_with_the_config_and_not_with_the_place(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = Checkpoint(folder).revision()
    copy = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert Checkpoint(copy).revision() == first

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][5] += 1

    rewrite(copy, nudge)
    second = Checkpoint(copy).revision()
    config = json.loads((copy / "config.json").read_text()) | {"rms_norm_eps": 1e-4}
    (copy / "config.json").write_text(json.dumps(config))
    assert len({first, second, Checkpoint(copy).revision()}) == 3
