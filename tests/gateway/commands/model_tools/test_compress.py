"""`hearth models compress` and `expand`, and what other commands say of a compressed folder. How folders are made is
tested in tests/engine/compression, and that they serve, and end with the engine's status, in tests/end_to_end/
test_compressed.py.
"""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from engine.bf12.metadata import CompressionLevel
from engine.compression.compress import compress_folder
from engine.compression.source import scan_folder
from engine.hostinfo import gpus
from engine.models.config import read_decoder_config
from engine.models.weight_names import decoder_entries as table_of
from engine.protocol.reports import MEMORY_REPORT_SUFFIX, MemoryReport
from engine.protocol.specs import ModelSpec
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import bf12_formats_bytes, formats_bytes, select_formats
from engine.weights.validate import inspect_weights
from gateway.catalogue.bf12_size import read_bf12_size
from gateway.catalogue.catalogue import model_entries, spec_of
from gateway.catalogue.checksums import SUMS_NAME, write_sums
from gateway.cli import main
from gateway.commands.model_tools.size import sizes_of
from gateway.settings.config import load_config
from tests.support.compressed_folders import llama_config, llama_tensors, write_file
from tests.support.model_folders import EMBER

NAME = "@cf/acme/assistant"
VOCABULARY = 4096
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of bf16 weights, 1.4 MiB, below an empty current folder."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "assistant"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBER / name, made)
    (made / "config.json").write_text(json.dumps(llama_config(vocabulary=VOCABULARY)))
    write_file(made / "model.safetensors", llama_tensors(vocabulary=VOCABULARY))
    return made


@pytest.fixture(params=CompressionLevel, ids=lambda level: level.name)
def twelve(folder: Path, request: pytest.FixtureRequest) -> Path:
    """It in 12 bits."""
    compress_folder(scan_folder(folder), folder.with_name("twelve"), request.param, torch.device("cpu"))
    return folder.with_name("twelve")


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(list(words)) == status
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return told.err if status else told.out


def one_gpu(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """One GPU that leaves models so many bytes."""
    found = [gpus.Gpu(0, "", "H200", GIB + room, GIB + room, "580", (9, 0))]
    monkeypatch.setattr(gpus, "installed_gpus", lambda: found)
    monkeypatch.setattr(gpus, "torch_cuda_version", lambda: "13.0")


def test_the_commands_make_a_folder_and_its_original(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_sums(folder, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
    assert main(["models", "compress", "assistant", "--distribution", "twelve"]) == 0
    assert "`hearth models add NAME twelve`" in capfd.readouterr().out
    assert main(["models", "add", NAME, "twelve"]) == 0
    assert "4 files are what SHA256SUMS says" in capfd.readouterr().out
    assert main(["models", "expand", NAME, "--json", "back"]) == 0
    assert json.loads(capfd.readouterr().out)["files"] == 1
    for path in folder.iterdir():
        assert (Path("back") / path.name).read_bytes() == path.read_bytes()
    assert (Path("back") / SUMS_NAME).exists()


def test_wrong_usage_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compress", "expand"):
        assert "x is neither a folder nor a model of the cat" in said(capsys, "models", command, "x", "y", status=1)
    assert "or --dry-run" in said(capsys, "models", "compress", "assistant", status=1)


def test_a_compressed_folder_is_listed_and_shown_as_one(twelve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "models", "add", NAME, "twelve")
    assert " MiB, 12 bits" in said(capsys, "models", "list")
    shown = json.loads(said(capsys, "models", "show", NAME, "--json"))
    original = Path("assistant/model.safetensors").stat().st_size
    assert shown["weights_bytes"] == (twelve / "model.safetensors").stat().st_size
    assert shown["compressed"]["original_bytes"] == original
    assert shown["compressed"]["kind"].startswith("12 bits, 99.")
    assert shown["memory_bytes"] == original + 1024 * shown["kv_bytes_per_token"], "a CPU expands it"
    level = shown["compressed"]["level"]
    assert f"of the numbers; bf16 would be 1.6 MiB; level {level}" in said(capsys, "models", "show", NAME)


def test_memory_is_reckoned_as_each_device_has_the_weights(
    twelve: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coded on a GPU in bfloat16, expanded anywhere else."""
    original = Path("assistant/model.safetensors").stat().st_size
    kv = 2 * 2 * 64 * 1024 * 2
    one_gpu(monkeypatch, kv + original * 8 // 10)
    told = said(capsys, "models", "add", NAME, "assistant", status=1)
    assert "compress it (`hearth models compress`)" in told
    for words in (["--dtype", "float16"], ["--dtype", "float32"]):
        assert "more than the" in said(capsys, "models", "add", NAME, "twelve", *words, status=1)
    said(capsys, "models", "add", NAME, "twelve")
    shown = json.loads(said(capsys, "models", "show", NAME, "--json"))
    assert shown["memory_bytes"] - kv == pytest.approx(0.75 * original, rel=0.01)
    said(capsys, "models", "remove", NAME)
    monkeypatch.setattr(gpus, "installed_gpus", list)
    Path("hearth.toml").write_text(f"[machine]\ndevice_bytes = {kv + original * 8 // 10}\n")
    assert "more than the" in said(capsys, "models", "add", NAME, "twelve", status=1)


def test_inspection_reckons_as_loading_does(twelve: Path) -> None:
    found = inspect_weights(ModelSpec(name=NAME, folder=str(twelve)))
    config, stored = read_decoder_config(twelve), Checkpoint(twelve).tensors
    formats = select_formats(table_of(config), stored, torch.bfloat16, torch.device("cuda"))
    assert found.coded_bytes == bf12_formats_bytes(formats) > 0
    norms = (2 * config.layers + 1) * config.hidden  # which are in float32
    assert formats_bytes(formats) == found.coded_bytes + 2 * (found.numbers - found.coded_numbers) + 2 * norms


def test_a_machine_guesses_by_what_a_device_has(twelve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "models", "add", NAME, "twelve")
    original = Path("assistant/model.safetensors").stat().st_size
    for device, share in (("cuda", 0.75), ("cpu", 1.0)):
        config = load_config(device=device)
        entry = next(entry for entry in model_entries(config) if entry.name == NAME)
        assert spec_of(config, entry).weights_bytes == pytest.approx(share * original, rel=0.01)
    sizes = sizes_of(config, entry)
    assert sizes is not None
    assert sizes.on_a_cpu.weights_bytes == original
    half = sizes_of(config, msgspec.structs.replace(entry, dtype="float16"))
    assert half is not None
    assert half.weights_bytes == original, "a GPU expands it too"


def test_a_file_beside_compressed_ones_is_counted_as_it_is(twelve: Path) -> None:
    alone = read_bf12_size(twelve)
    shutil.copy("assistant/model.safetensors", twelve / "other.safetensors")
    size = (twelve / "other.safetensors").stat().st_size
    both = read_bf12_size(twelve)
    assert alone is not None
    assert both == replace(alone, stored_bytes=alone.stored_bytes + size, original_bytes=alone.original_bytes + size)


def test_folders_that_are_not_compressed_or_broken_are_not_taken_for_it(twelve: Path) -> None:
    assert read_bf12_size(Path("assistant")) is None
    path = twelve / "model.safetensors"
    content = path.read_bytes()
    assert read_bf12_size(twelve) is not None
    for spoilt in (b"", content[:7], content[:200], content.replace(b'\\"level\\"', b'\\"lovel\\"')):
        path.write_bytes(spoilt)
        assert read_bf12_size(twelve) is None


def test_a_running_replica_says_what_is_in_12_bits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = load_config().run_folder
    run_folder.mkdir(parents=True)
    memory = MemoryReport(
        model="@cf/hearth/ember", pid=os.getpid(), device="H200", device_bytes=140 << 30, weights_bytes=12 << 30,
        coded_bytes=11 << 30, bf16_bytes=15 << 30, kv_blocks=1, kv_block_tokens=16, kv_bytes=1, free_bytes=0,
    )  # fmt: skip
    (run_folder / f"a{MEMORY_REPORT_SUFFIX}").write_bytes(msgspec.json.encode(memory))
    shown = said(capsys, "models", "show", "@cf/hearth/ember")
    assert "weights in 12 bits           11.0 GiB" in shown
    assert "weights as bf16              15.0 GiB" in shown
