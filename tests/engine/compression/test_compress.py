"""engine/compression: every bit of every file comes back, in a format that others can read, and
what cannot be compressed is refused by name. How folders appear is tested in test_target.py.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.bf12 import metadata as bf12_metadata
from engine.bf12.metadata import ALIGNED_BYTES, CompressionLevel
from engine.compression import survey
from engine.compression.checksums import parse_sums, replace_sums
from engine.compression.compress import compress_folder, estimate
from engine.compression.expand import expand_folder
from engine.compression.report import CompressionReport, format_report
from engine.compression.source import scan_folder
from engine.compression.writer import Bf12Writer
from engine.weights.safetensors_header import encode_header, read_header
from engine.weights.tensor_index import CheckpointError
from gateway.catalogue.checksums import read_sums, require_sums, write_sums
from tests.engine.bf12.test_codec import gaussian
from tests.support import bf12_files
from tests.support.compressed_folders import llama_config, llama_tensors, with_bits, write_file, write_folder

CPU = torch.device("cpu")
LEVELS = pytest.mark.parametrize("level", CompressionLevel, ids=lambda level: level.name)


def compressed(source: Path, target: Path, level: CompressionLevel = CompressionLevel.DEVICE) -> CompressionReport:
    return compress_folder(scan_folder(source), target, level, CPU)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def require_way_back(source: Path, level: CompressionLevel) -> CompressionReport:
    """The original's files, from a folder beside it, which stays there."""
    made, back = source.with_name(f"{source.name}-12"), source.with_name(f"{source.name}-back")
    report = compressed(source, made, level)
    expand_folder(made, back, CPU)
    assert files(back) == files(source)
    shutil.rmtree(back)
    return report


def kinds(report: CompressionReport) -> dict[str, str]:
    return {tensor.name: tensor.kind for tensor in report.tensors}


@LEVELS
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from([(256, 1024), (1001, 384), (401, 640), (4096, 128)]),
    bits=st.dictionaries(st.integers(0, (1 << 15) - 1), st.integers(0, (1 << 16) - 1), max_size=5),
    any_bits=st.integers(0, 1 << 32),
)
def test_every_bit_comes_back(
    tmp_path: Path, level: CompressionLevel, shape: tuple[int, int], bits: dict[int, int], any_bits: int
) -> None:
    generator = torch.Generator().manual_seed(any_bits)
    wild = torch.randint(-(1 << 15), 1 << 15, (64, 128), generator=generator).to(torch.int16).view(torch.bfloat16)
    shutil.rmtree(tmp_path)
    tensors = {"wild": wild, "tame": with_bits(gaussian(*shape, seed=any_bits % 97), bits), "odd": wild[:1, :3]}
    found = kinds(require_way_back(write_folder(tmp_path / "model", tensors), level))
    assert found == {"wild": "bf16", "tame": "bf12", "odd": "bf16"}


@LEVELS
def test_special_numbers_are_escapes_that_come_back(tmp_path: Path, level: CompressionLevel) -> None:
    special = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x807F, 0x0080]
    weight_NK = with_bits(gaussian(512, 1024), {37 * place: bits for place, bits in enumerate(special)})
    report = require_way_back(write_folder(tmp_path / "model", {"weight": weight_NK}), level)
    (tensor,) = report.tensors
    assert tensor.kind == "bf12"
    assert tensor.escapes is not None
    assert len(special) <= tensor.escapes <= 0.0002 * weight_NK.numel()
    assert tensor.bytes_after < (0.752 if level is CompressionLevel.DEVICE else 0.68) * tensor.bytes_before


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: torch.zeros(64, 256), "bf12"),
        (lambda: torch.full((64, 256), float("nan")), "bf16"),
        (lambda: torch.ones(64, 256), "bf12"),
        (lambda: torch.full((64, 256), -8e37), "bf12"),
        (lambda: torch.full((64, 256), -3e38), "bf12"),
        (lambda: torch.full((64, 256), -float("inf")), "bf16"),
        (lambda: torch.tensor([1.0, 2.0**-40]).repeat(64, 128), "bf16"),
        (lambda: 2.0 ** (torch.arange(256) % 16 - 9).repeat(64, 1), "bf12"),
        (lambda: 2.0 ** (torch.arange(256) % 18 - 9).repeat(64, 1), "bf16"),
    ],
    ids=[
        "zeros",
        "nan",
        "ones",
        "large",
        "the largest",
        "infinities",
        "two far exponents",
        "16 exponents",
        "18 exponents",
    ],
)
def test_what_has_no_code_is_kept_and_said(tmp_path: Path, made: Callable[[], Tensor], kind: str) -> None:
    tensors = {"odd": made().bfloat16(), "even": gaussian(8, 128)}
    report = require_way_back(write_folder(tmp_path / "model", tensors), CompressionLevel.DEVICE)
    odd = next(tensor for tensor in report.tensors if tensor.name == "odd")
    assert odd.kind == kind
    assert bool(odd.reason) == (kind == "bf16")


@LEVELS
@pytest.mark.parametrize("turned", [False, True])
def test_headers_and_tensors_of_every_kind_come_back(tmp_path: Path, level: CompressionLevel, turned: bool) -> None:
    tensors = {
        "a.number": torch.tensor(2.5), "none": torch.empty(0, 128, dtype=torch.bfloat16), "masks": torch.tensor([True]),
        "weight": gaussian(48, 256), "bytes": torch.arange(7, dtype=torch.uint8), "cube": torch.ones(3, 5, 7).half(),
        "положення": torch.arange(5), "more": gaussian(16, 1024), "scale": torch.ones(3, dtype=torch.bfloat16),
        "vector": torch.ones(128, dtype=torch.bfloat16), "large": torch.ones(1500, 1000), "narrow": gaussian(9, 100),
    }  # fmt: skip
    folder = write_folder(tmp_path / "model", {})
    write_file(folder / "model.safetensors", tensors, {"format": "pt", "hé": '"\n'}, blanks=5, turned=turned)
    found = kinds(require_way_back(folder, level))
    assert [name for name, kind in found.items() if kind == "bf12"] == ["weight", "more"]
    path = tmp_path / "model-12" / "model.safetensors"
    for tensor in read_header(path).tensors:
        words = tensor.dtype == "I32"
        assert tensor.first % (ALIGNED_BYTES if words else tensor.item_bytes) == 0, tensor
    loaded = load_file(path)
    for name in tensors.keys() - {"weight", "more"}:
        assert torch.equal(loaded[name], tensors[name]), name
    with safe_open(path, "pt") as opened:
        said = bf12_metadata.parse_metadata(opened.metadata())
        assert opened.metadata()["format"] == "pt"
        assert opened.get_slice("weight").get_dtype() == "I32"
    assert said is not None
    assert (said.level, said.codes.keys()) == (level, {"weight", "more"})


def test_a_folder_of_several_files_keeps_its_index_and_all_else(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / ".hearth").mkdir()
    (folder / ".hearth" / "measured").write_text("of these weights")
    tensors = list(llama_tensors().items())
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, (tensors[:7], tensors[7:]), strict=True):
        write_file(blobs / name, dict(part), {"format": "pt"})
        (folder / name).symlink_to(blobs / name)  # as the hub's cache has it
    map_ = {name: names[place >= 7] for place, (name, _) in enumerate(tensors)}
    index = {"metadata": {"total_size": 1}, "weight_map": map_}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=3))
    (folder / "config.json").write_text(json.dumps(llama_config()))
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "other.safetensors").write_bytes(b"named by nobody")
    report = compressed(folder, tmp_path / "made")
    made, kept = files(tmp_path / "made"), files(folder)
    del kept[".hearth/measured"]
    assert made.keys() == kept.keys()
    assert {name for name in made if made[name] != kept[name]} == set(names)
    assert not any(path.is_symlink() for path in (tmp_path / "made").rglob("*"))
    assert all(tensor.kind == "bf12" for tensor in report.tensors if len(tensor.shape) == 2)
    expand_folder(tmp_path / "made", tmp_path / "back", CPU)
    assert files(tmp_path / "back") == kept


def test_sources_of_one_parameter_are_coded_together_or_not_at_all(tmp_path: Path) -> None:
    tensors = llama_tensors()
    bad = "model.layers.1.self_attn.k_proj.weight"
    tensors[bad] = tensors[bad] * torch.tensor([1.0, 0.0]).repeat(tensors[bad].shape[1] // 2).bfloat16()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config()))
    half = list(tensors.items())
    at = next(place for place, (name, _) in enumerate(half) if name == bad)
    write_file(folder / "a.safetensors", dict(half[: at + 1]))  # k is in another file than q and v
    write_file(folder / "b.safetensors", dict(half[at + 1 :]))
    report = require_way_back(folder, CompressionLevel.DEVICE)
    kept = {tensor.name: tensor.reason for tensor in report.tensors if tensor.kind != "bf12" and len(tensor.shape) == 2}
    beside = f"{bad}, which it lies beside, is kept"
    assert kept == {
        bad: "more of its numbers have no code than pays",
        "model.layers.1.self_attn.q_proj.weight": beside,
        "model.layers.1.self_attn.v_proj.weight": beside,
    }


def test_what_is_slower_in_12_bits_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def pays(outputs: int, inputs: int, gated: bool) -> bool:
        asked.add((outputs, inputs, gated))
        return not gated

    monkeypatch.setattr(survey, "bf12_pays_off", pays)
    folder = write_folder(tmp_path / "model", llama_tensors())
    (folder / "config.json").write_text(json.dumps(llama_config()))
    report = require_way_back(folder, CompressionLevel.DEVICE)
    assert asked == {(256, 128, False), (512, 128, True), (128, 256, False), (128, 128, False)}
    kept = [tensor.name for tensor in report.tensors if tensor.reason == "in 12 bits it is slower, as measured"]
    assert kept == [f"model.layers.{n}.mlp.{name}_proj.weight" for n in (0, 1) for name in ("gate", "up")]


@LEVELS
def test_gaussian_weights_take_what_was_promised(tmp_path: Path, level: CompressionLevel) -> None:
    folder = write_folder(tmp_path / "model", {"weight": gaussian(2048, 1024)})
    report = compressed(folder, tmp_path / "made", level)
    assert report.bytes_after == (tmp_path / "made" / "model.safetensors").stat().st_size
    assert report.bytes_after < (0.755 if level is CompressionLevel.DEVICE else 0.68) * report.bytes_before


@LEVELS
def test_a_dry_run_writes_nothing_and_says_what_would_be(tmp_path: Path, level: CompressionLevel) -> None:
    tensors = {"weight": gaussian(512, 1024), "narrow": gaussian(64, 100), "vector": gaussian(1, 9)[0]}
    tensors |= {
        "none": torch.empty(3, 0).bfloat16(),
        "nor": torch.empty(0, 128).bfloat16(),
        "one": torch.ones(()).bfloat16(),
    }
    folder = write_folder(tmp_path / "model", tensors)
    seen, made = estimate(scan_folder(folder), level, CPU), compressed(folder, tmp_path / "made", level)
    shutil.rmtree(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert kinds(seen) == kinds(made)
    assert seen.bytes_after == pytest.approx(made.bytes_after, rel=0.01)
    narrow = next(tensor for tensor in seen.tensors if tensor.name == "narrow")
    assert (narrow.reason, narrow.escapes is not None) == ("its shape has no code", True)
    assert next(tensor.escapes for tensor in seen.tensors if tensor.name == "vector") is None
    shown = "\n".join(format_report(seen))
    assert "512×1024" in shown
    assert "its shape has no code" in shown
    assert "would be in 12 bits" in shown


def test_sums_are_those_of_the_new_files_and_come_back(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {"weight": gaussian(64, 256)})
    write_sums(folder, {name: hashlib.sha256(content).hexdigest() for name, content in files(folder).items()})
    require_way_back(folder, CompressionLevel.DEVICE)
    made = tmp_path / "model-12"
    assert read_sums(made).keys() == read_sums(folder).keys()
    require_sums(made, read_sums(made))
    damaged = bytearray((folder / "model.safetensors").read_bytes())
    damaged[-9] ^= 4
    (folder / "model.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"model.safetensors is not what SHA256SUMS says"):
        compressed(folder, tmp_path / "laundered")
    assert not (tmp_path / "laundered").exists()


def test_lines_of_sums_keep_their_names_as_they_are_written() -> None:
    old, new = "a" * 64, "b" * 64
    text = f"{old} *w.safetensors\r\n\\{old}  odd\\nname\n{old.upper()}  ./d/x\nnone of them\n"
    assert parse_sums(text) == {"w.safetensors\r": old, "odd\nname": old, "d/x": old}
    changed = replace_sums(text, {"odd\nname": new, "d/x": new})
    assert changed == f"{old} *w.safetensors\r\n\\{new}  odd\\nname\n{new}  ./d/x\nnone of them\n"


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model", {"weight": gaussian(64, 256)})
    finish = Bf12Writer.finish

    def changed(writing: Bf12Writer, read: Callable[[int, int], bytearray]) -> None:
        os.utime(folder / "model.safetensors", ns=(1, 1))
        finish(writing, read)

    monkeypatch.setattr(Bf12Writer, "finish", changed)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        compressed(folder, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _instead(tensors: dict[str, Tensor], metadata: object = None) -> Callable[[Path], object]:
    return lambda folder: write_file(folder / "model.safetensors", tensors, metadata)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _again(folder: Path) -> None:
    compressed(folder, folder / ".." / "made")
    shutil.copy(folder / ".." / "made" / "model.safetensors", folder)
    shutil.rmtree(folder / ".." / "made")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "float32": (_instead({"weight": gaussian(16, 256).float()}), "its matrices are F32. Convert it to bf16"),
    "narrow": (_instead({"weight": gaussian(16, 100)}), "rows are multiples of 128"),
    "vectors": (_instead({"weight": gaussian(1, 128)[0]}), "its matrices are none"),
    "planes": (_instead({"weight": gaussian(16, 256), "x.high": torch.ones(3)}), "names like x.high"),
    "bases": (_instead({"weight": gaussian(16, 256), "x.bases": torch.ones(3)}), "names like x.bases"),
    "cut": (_cut, "cut short or added to"),
    "no header": (lambda folder: (folder / "model.safetensors").write_bytes(b"none"), "no safetensors file"),
    "metadata": (_instead({"weight": gaussian(16, 256)}, {"a": 1}), "its header: Expected `str`, got `int`"),
    "again": (_again, "is compressed already, at level device: `hearth models expand`"),
    "nothing": (_without("model.safetensors"), "has no *.safetensors"),
    "pickles": (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "only pickle files"),
    "index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "lacks b.safetensors, which model.safetensors.index.json names",
    ),
    "sums": (lambda folder: (folder / "SHA256SUMS.original").write_text(""), "rename it"),
}


@pytest.mark.parametrize(("broken", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_what_cannot_be_compressed_is_refused_by_name(
    tmp_path: Path, broken: Callable[[Path], object], said: str
) -> None:
    folder = write_folder(tmp_path / "model", {"weight": gaussian(16, 256)})
    broken(folder)
    with pytest.raises(CheckpointError) as refused:
        compressed(folder, tmp_path / "made")
    assert said in str(refused.value)
    assert str(folder) in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_not_compressed_cannot_be_expanded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {"weight": gaussian(16, 256)})
    with pytest.raises(CheckpointError, match="is not compressed: there is nothing to expand"):
        expand_folder(folder, tmp_path / "made", CPU)
    with pytest.raises(CheckpointError, match="there is no folder"):
        expand_folder(tmp_path / "nowhere", tmp_path / "made", CPU)


@LEVELS
def test_an_altered_file_is_refused_or_gives_the_original(tmp_path: Path, level: CompressionLevel) -> None:
    """Blanks of a header may be altered for other blanks: no more than that goes unnoticed."""
    tensors = {"weight": with_bits(gaussian(64, 1024), {5: 0, 900: 0x7FC0}), "bias": gaussian(1, 77)[0]}
    folder = write_folder(tmp_path / "model", tensors)
    compressed(folder, tmp_path / "made", level)
    path = tmp_path / "made" / "model.safetensors"
    good, dice, refused = path.read_bytes(), random.Random(level), 0
    for turn in range(150):
        altered = bytearray(good)
        if turn % 10:
            altered[dice.randrange(len(good))] ^= 1 << dice.randrange(8)
        else:
            del altered[dice.randrange(len(good)) :]
        path.write_bytes(altered)
        try:
            expand_folder(tmp_path / "made", tmp_path / "back", CPU)
        except CheckpointError:
            refused += 1
            assert not list(tmp_path.glob("back*"))
            continue
        assert files(tmp_path / "back") == files(folder)
        shutil.rmtree(tmp_path / "back")
    assert refused >= 140


def test_what_was_altered_is_named(tmp_path: Path) -> None:
    tensors = {"weight": gaussian(64, 1024), "bias": gaussian(1, 77)[0]}
    folder, path = write_folder(tmp_path / "model", tensors), tmp_path / "made" / "model.safetensors"
    compressed(folder, tmp_path / "made", CompressionLevel.DISTRIBUTION)
    good = path.read_bytes()
    placed = {tensor.name: tensor for tensor in read_header(path).tensors}
    padding = placed["weight.high"].last - 1
    assert good[padding] == 0
    for place, said in (
        (placed["weight"].first, "weight is not as it was written"),
        (placed["bias"].first, "bias is not as it was written"),
        (placed["weight.bases"].first, "weight.bases is not as it was written"),
        (padding, "weight was altered behind its frames"),
    ):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match=said):
            expand_folder(tmp_path / "made", tmp_path / "back", CPU)


def test_a_frame_is_no_longer_than_a_piece(tmp_path: Path) -> None:
    folder, path = write_folder(tmp_path / "model", {"weight": gaussian(64, 256)}), tmp_path / "made/model.safetensors"
    compressed(folder, tmp_path / "made", CompressionLevel.DISTRIBUTION)
    long = 2 * bf12_metadata.PIECE_BYTES
    planes = load_file(path) | {"weight.high": torch.zeros(long).byte(), "weight.high_ends": torch.tensor([long])}
    bf12_files.write_file(path, planes, read_header(path).metadata)
    with pytest.raises(CheckpointError, match="weight has frames that do not fit"):
        expand_folder(tmp_path / "made", tmp_path / "back", CPU)


def test_every_sum_that_is_noted_counts(tmp_path: Path) -> None:
    """Also those that only a wrong codec, or wrong notes with a right sum, would tell."""
    folder = write_folder(tmp_path / "model", {"weight": gaussian(64, 256), "bias": gaussian(1, 64)[0]})
    path = tmp_path / "made" / "model.safetensors"
    compressed(folder, tmp_path / "made")
    header, good = read_header(path), path.read_bytes()
    said = bf12_metadata.parse_metadata(header.metadata)
    assert said is not None
    zeros = "0" * 32
    for wrong, told in (
        (structs.replace(said, codes={"weight": zeros}), "weight is not the tensor that was compressed"),
        (structs.replace(said, original=structs.replace(said.original, xxh3_128=zeros)), "does not give the file"),
        (structs.replace(said, pieces=said.pieces | {"bias": []}), "has 0 sums of bias, which has 1 pieces"),
        (structs.replace(said, codes={}), "weight.bases"),
    ):
        start = encode_header(header.tensors, bf12_metadata.encode_metadata(wrong), header.first)
        path.write_bytes(start + good[header.first :])
        with pytest.raises(CheckpointError, match=told):
            expand_folder(tmp_path / "made", tmp_path / "back", CPU)


@pytest.mark.timeout(300)  # a loaded machine imports torch for half a minute
def test_memory_is_bounded_by_pieces(tmp_path: Path) -> None:
    """A matrix of 512 MiB, in a process of which torch alone takes some 300, and each core some 30."""
    folder = write_folder(tmp_path / "model", {"weight": gaussian(16, 256)})
    block = gaussian(1024, 4096).view(torch.int16).numpy().tobytes()
    shape = [1024 * 64, 4096]
    header = json.dumps({"weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 64 * len(block)]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(64):
            file.write(block)
    command = [sys.executable, "-m", "engine.compression.compress", str(folder), str(tmp_path / "made"), "--json"]
    done = subprocess.run([sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said, _, peak = done.stdout.rpartition("\n")
    assert json.loads(said)["bytes_after"] < 0.751 * (512 << 20)
    assert int(peak) << 10 < 650 << 20


_MEASURED = """
import os, resource, subprocess, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
status = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, end="", flush=True)
sys.exit(status)
"""
