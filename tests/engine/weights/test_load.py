"""engine/weights/load.py: a good checkpoint loads, whole or in shards, and says how far it is; a bad one is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.config import read_decoder_config
from engine.models.llama import DecoderParameters
from engine.weights import progress as module
from engine.weights.assembly import weights_bytes
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.load import ModelFiles
from engine.weights.progress import ProgressBar
from engine.weights.source import WeightSource
from tests.support.small_models import reference_model, saved

FAMILY = "llama 3.2 tied"
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(reference_model(FAMILY), tmp_path)


def loaded(folder: Path, beats: list[int] | None = None) -> Any:
    beat = (lambda: beats.append(1)) if beats is not None else (lambda: None)
    return made(folder, torch.float32, CPU, beat)


def made(
    folder: Path, dtype: torch.dtype, device: torch.device, beat: Callable[[], None] = lambda: None
) -> DecoderParameters:
    return WeightSource.open(folder, read_decoder_config(folder), dtype, device, random=False).load(beat)


def test_beats_for_each_layer_and_counts_bytes(folder: Path) -> None:
    beats: list[int] = []
    parameters = loaded(folder, beats)
    assert len(beats) >= 3 + 1
    head_copy = 160 * 64
    weights = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert weights_bytes(parameters) == 4 * (weights + head_copy)


def test_shards_give_the_same_parameters_as_one_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sharded = saved(reference_model(FAMILY), tmp_path_factory.mktemp("sharded"), shard="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    x = torch.randn(3, 64)
    with torch.inference_mode():
        one, many = loaded(folder), loaded(sharded)
        assert torch.equal(one.embedding, many.embedding)
        for left, right in zip(one.layers, many.layers, strict=True):
            assert torch.equal(left.qkv(x), right.qkv(x))
            assert torch.equal(left.mlp(x, None), right.mlp(x, None))


def test_files_that_are_as_they_were_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles(folder, random=False)
    assert files.revision == Checkpoint(folder).revision()
    monkeypatch.setattr(Checkpoint, "revision", lambda self: pytest.fail("they were read"))
    files.reread(list)


def test_a_disk_that_vanishes_as_files_are_read_is_told_of(folder: Path) -> None:
    def read() -> None:
        raise OSError("no such device")

    with pytest.raises(CheckpointError, match="no such device"):
        ModelFiles(folder, random=False).reread(read)


def test_files_that_were_written_again_may_hold_the_same(folder: Path) -> None:
    files = ModelFiles(folder, random=False)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    files.reread(list)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("random", [False, True])
def test_files_that_hold_something_else_or_are_gone_are_found(folder: Path, name: str, random: bool) -> None:
    files = ModelFiles(folder, random)
    if random and name != "config.json":
        (folder / name).unlink()
        files.reread(list)
        return
    path = folder / name
    held = path.read_bytes()
    path.write_bytes(held[:-2] + b" }" if name == "config.json" else held[:-1] + bytes([held[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="changed"):
        files.reread(list)
    path.unlink()
    with pytest.raises(CheckpointError):
        files.reread(list)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_a_tensor_that_is_not_as_the_config_says_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[63\]"):
        loaded(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.2.self_attn.v_proj.weight", "model.norm.weight"])
def test_a_value_that_is_not_finite_is_refused_and_its_tensor_named(folder: Path, name: str, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[[3, 7]] = value

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError, match=rf"{name}, stored as F32, has 2 values that are not finite"):
        loaded(folder)


def test_a_value_that_is_too_large_for_the_dtype_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors["model.embed_tokens.weight"][0].fill_(1e30))
    assert torch.isfinite(loaded(folder).embedding).all()
    with torch.inference_mode(), pytest.raises(CheckpointError, match=r"not finite as torch\.float16"):
        made(folder, torch.float16, CPU)


def test_it_tells_percents_to_a_log_and_draws_a_bar_on_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOG_S", 0.0)
    with ProgressBar("loading", 200) as progress:
        for count in (50, 86, 200):
            progress.advance_to(count)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["event"], line["percent"]) for line in lines] == [("loading", 25), ("loading", 43), ("loading", 100)]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar("loading", 200) as progress:
        progress.advance_to(50)
        progress.advance_to(200)
    assert "100%" in capfd.readouterr().err


@pytest.mark.gpu
def test_a_gpu_holds_what_a_cpu_does_and_refuses_what_is_not_finite(folder: Path) -> None:
    gpu = torch.device("cuda", 0)
    with torch.inference_mode():
        here, there = made(folder, torch.bfloat16, CPU), made(folder, torch.bfloat16, gpu)
        assert torch.equal(here.embedding, there.embedding.cpu())
        planned = WeightSource.open(folder, read_decoder_config(folder), torch.bfloat16, gpu, random=False).bytes
        assert weights_bytes(there) == planned, "a tied head is no copy"
        x = torch.randn(5, 64).bfloat16()
        for left, right in zip(here.layers, there.layers, strict=True):
            assert torch.equal(left.attention_norm, right.attention_norm.cpu())
            wanted, got = left.qkv.logits(x).float(), right.qkv.logits(x.to(gpu)).cpu().float()
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    rewrite(folder, lambda tensors: tensors["model.norm.weight"][3:5].fill_(float("nan")))
    with torch.inference_mode(), pytest.raises(CheckpointError, match=r"model\.norm\.weight, .* has 2 values"):
        made(folder, torch.bfloat16, gpu)
