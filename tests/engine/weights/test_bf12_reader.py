"""engine/weights/bf12_reader.py and pieces.py: a compressed file is what it says, plane by plane and byte by byte, or
it is refused before anything runs.
"""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from engine.bf12 import metadata as bf12_metadata
from engine.bf12.codec import Bf12Matrix, Bf12Weight, EscapeIndex, Escapes, choose_bases, decode
from engine.bf12.metadata import Bf12Metadata, CompressionLevel
from engine.models.weight_names import ParameterEntry, TensorSource
from engine.weights import bf12_reader, pieces, streaming
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.formats import FIRSTS, PLACES, SCALES, VALUES, WORDS, select_formats
from engine.weights.load import load_tensors
from tests.support.bf12_files import codable, raw, sums_of, write_coded, write_file

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LEVELS = list(CompressionLevel)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives small tensors several pieces."""
    for module in (bf12_metadata, bf12_reader, pieces):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(streaming, "SLAB_BYTES", 4096)


def originals() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    wide = (torch.randn(40, 256, generator=generator) * 0.02).bfloat16()
    wide.view(-1)[[0, 7, 1000, 10239]] = torch.tensor([0.0, 1e9, -0.0, 1e-40]).bfloat16()
    return {
        "wide": wide,
        "low": (torch.randn(9, 256, generator=generator) * 30).bfloat16(),
        "bias": torch.randn(49, generator=generator).bfloat16(),
        "norm": torch.randn(2000, generator=generator),
        "kept": torch.randn(3, 50, generator=generator).bfloat16(),
    }


TABLE = [
    ParameterEntry("both", (TensorSource("wide", (40, 256)), TensorSource("low", (9, 256)))),
    ParameterEntry("bias", (TensorSource("bias", (49,)),)),
    ParameterEntry("norm", (TensorSource("norm", (2000,)),)),
    ParameterEntry("kept", (TensorSource("kept", (3, 50)),)),
]


def read(folder: Path, device: torch.device = GPU) -> dict[str, Tensor]:
    """As a CPU or a GPU has the tensors, in host memory."""
    checkpoint = Checkpoint(folder)
    checkpoint.require(TABLE, lambda name: False)
    formats = select_formats(TABLE, checkpoint.tensors, torch.bfloat16, device)
    with torch.inference_mode():
        return load_tensors(checkpoint.tensors, TABLE, formats, CPU, lambda: None)


def numbers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Words and their index as kernels take them → numbers; the rest as it is."""
    if "both" in tensors:
        return tensors
    index = EscapeIndex(*(tensors["both" + part] for part in (SCALES, FIRSTS, PLACES, VALUES)))
    both = {name: tensor for name, tensor in tensors.items() if not name.startswith("both.")}
    return both | {"both": expanded(Bf12Weight(tensors["both" + WORDS], index))}


def expanded(weight: Bf12Weight) -> Tensor:
    """By the index alone, row by row."""
    rows = []
    for output in range(weight.outputs):
        scale = weight.index.scales_N[output]
        base_N = (scale.log2().int() + 128 if scale else scale).view(1).to(torch.uint8)
        group = output // 16
        first, last = weight.index.firsts_G[group : group + 2].tolist()
        places, values = weight.index.places_E[first:last], weight.index.values_E[first:last]
        mine = places >> 16 == output
        escapes = Escapes(1, weight.inputs, base_N, (places[mine] & 0xFFFF).long(), values[mine])
        rows.append(decode(Bf12Matrix(weight.words_NW[output : output + 1], escapes)))
    return torch.cat(rows)


def same(tensors: dict[str, Tensor]) -> bool:
    original = originals()
    wanted = {name: original[name] for name in ("bias", "norm", "kept")}
    wanted["both"] = torch.cat((original["wide"], original["low"]))
    found = numbers(tensors)
    return found.keys() == wanted.keys() and all(bits(found[name]).equal(bits(wanted[name])) for name in wanted)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(params=LEVELS, ids=[level.name for level in LEVELS])
def level(request: pytest.FixtureRequest) -> CompressionLevel:
    chosen: CompressionLevel = request.param
    return chosen


@pytest.fixture
def file(tmp_path: Path, level: CompressionLevel) -> Path:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    write_coded(path, originals(), level)
    return path


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_every_bit_comes_back(file: Path, device: torch.device) -> None:
    assert same(read(file.parent, device))


def test_a_coded_tensor_has_its_own_name_and_shape_and_planes_have_none(file: Path) -> None:
    tensors = Checkpoint(file.parent).tensors
    assert tensors.keys() == originals().keys()
    assert (tensors["wide"].dtype, tensors["wide"].shape) == ("BF12", (40, 256))
    assert (tensors["kept"].dtype, tensors["kept"].bf12) == ("BF16", None)
    assert sum(tensor.bytes for tensor in tensors.values()) == Checkpoint(file.parent).bytes
    header_bytes = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    assert Checkpoint(file.parent).bytes == file.stat().st_size - header_bytes


def test_the_header_alone_names_the_weights(file: Path, level: CompressionLevel) -> None:
    first = Checkpoint(file.parent).revision()
    assert Checkpoint(file.parent).revision() == first
    changed = originals()
    changed["wide"][3, 4] += 1
    write_coded(file, changed, level)
    assert Checkpoint(file.parent).revision() != first


Planes = dict[str, Tensor]
Change = Callable[[Planes, dict[str, Any]], None]


def rewrite(path: Path, change: Change) -> None:
    """The same file with other planes or metadata, whose own sum is right."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
    planes = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        flat = torch.tensor(list(content[8 + length + first : 8 + length + last]), dtype=torch.uint8)
        planes[name] = flat.view(dtypes[entry["dtype"]]).view(entry["shape"])
    said = json.loads(metadata[bf12_metadata.METADATA_KEY])
    change(planes, said)
    write_file(path, planes, bf12_metadata.encode_metadata(msgspec.convert(said, Bf12Metadata)))


def test_a_file_that_is_written_again_as_it_was_is_taken(file: Path) -> None:
    rewrite(file, lambda planes, said: None)
    assert same(read(file.parent))


def without(name: str) -> Change:
    return lambda planes, said: planes.__delitem__(name)


def with_plane(name: str, tensor: Tensor) -> Change:
    return lambda planes, said: planes.update({name: tensor})


def with_sum(text: str) -> dict[str, str]:
    """The metadata of a header that describes itself with `text`."""
    return {
        bf12_metadata.METADATA_KEY: text,
        bf12_metadata.METADATA_SUM_KEY: xxhash.xxh3_128_hexdigest(text.encode()),
    }


def without_sum(name: str) -> Change:
    return lambda planes, said: said["pieces"][name].__delitem__(-1)


def with_sums(name: str) -> Change:
    return lambda planes, said: said["pieces"].update({name: [1]})


def with_code(name: str) -> Change:
    return lambda planes, said: said["codes"].update({name: ""})


def without_code(name: str) -> Change:
    return lambda planes, said: said["codes"].__delitem__(name)


NARROW = torch.zeros(40, 95, dtype=torch.int32)
WRONG: list[tuple[Change, str]] = [
    (without("wide.escape_values"), r"model.safetensors lacks wide\.escape_values, unlike what its metadata say: get"),
    (without("low"), r"model.safetensors lacks low"),
    (with_code("kept"), r"lacks kept\.bases, kept\.escape_positions, kept\.escape_values"),
    (without_code("low"), r"has planes of no coded tensor: low"),
    (with_plane("odd", torch.zeros(4, dtype=torch.uint8)), r"has planes of no coded tensor: odd"),
    (with_plane("odd", torch.zeros(4)), r"has planes of no coded tensor: odd"),
    (without("bias"), r"model.safetensors lacks bias, unlike what its metadata say"),
    (with_plane("bias", originals()["bias"].view(torch.float16)), r"bias, F16 \[49\], is not what was compressed: get"),
    (with_plane("kept", originals()["kept"].view(50, 3)), r"kept, BF16 \[50, 3\], is not what was compressed: get"),
    (with_plane("wide", NARROW), r"wide is I32 \[40, 95\], which are no words"),
    (with_plane("wide", torch.zeros(96, dtype=torch.int32)), r"wide is I32 \[96\], which are no words"),
    (with_plane("wide", torch.zeros(0, 96, dtype=torch.int32)), r"wide is I32 \[0, 96\], which are no words"),
    (with_plane("wide", torch.zeros(40, 96)), r"wide is F32 \[40, 96\], which are no words"),
    (with_plane("wide.escape_values", torch.zeros(4)), r"wide\.escape_values is F32 \[4\], a row of BF16 is due"),
    (with_plane("wide.escape_positions", torch.zeros(2, 2).long()), r"positions is I64 \[2, 2\], a row of I64 is due"),
    (with_plane("wide.escape_positions", torch.zeros(9).long()), r"wide, \[40, 256\], has 9 positions and \d values"),
    (without_sum("low"), r"has \d+ sums of low, which has \d+ pieces"),
    (without_sum("norm"), r"has 1 sums of norm, which has 2 pieces"),
    (with_sums("other"), r"has sums of tensors that are not there: other"),
    (with_sums("wide.high"), r"has sums of tensors that are not there: wide\.high"),
    (with_plane("wide.bases", torch.full((39,), 100, dtype=torch.uint8)), r"wide, \[40, 256\], has 39 bases"),
    (with_plane("wide.bases", torch.zeros(40)), r"wide\.bases is F32 \[40\], a row of U8 is due"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_header_that_contradicts_its_metadata_is_refused(file: Path, change: Change, said: str) -> None:
    rewrite(file, change)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(file.parent)


def turned(planes: Planes, said: dict[str, Any]) -> None:
    said["level"] = 3 - said["level"]


def test_the_other_levels_planes_are_refused(file: Path, level: CompressionLevel) -> None:
    rewrite(file, turned)
    problem = r"lacks wide\.high, wide\.high_ends" if level is CompressionLevel.DEVICE else "no words|no coded tensor"
    with pytest.raises(CheckpointError, match=problem):
        Checkpoint(file.parent)


def test_metadata_that_are_not_understood_are_refused(file: Path) -> None:
    content = file.read_bytes()
    version = content.replace(rb"{\"version\":1,", rb"{\"version\":9,")
    assert version != content
    file.write_bytes(version)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is a compressed file, and its metadata were altered: get"
    ):
        Checkpoint(file.parent)
    said = msgspec.json.encode({"version": 9}).decode()
    metadata = {
        bf12_metadata.METADATA_KEY: said,
        bf12_metadata.METADATA_SUM_KEY: xxhash.xxh3_128_hexdigest(said.encode()),
    }
    write_file(file, {}, metadata)
    with pytest.raises(CheckpointError, match=r"of version 9 of the format, this Hearth reads version 1"):
        Checkpoint(file.parent)
    said = '{"version":1,"odd":' + "[" * 100_000
    write_file(
        file,
        {},
        {bf12_metadata.METADATA_KEY: said, bf12_metadata.METADATA_SUM_KEY: xxhash.xxh3_128_hexdigest(said.encode())},
    )
    with pytest.raises(CheckpointError, match=r"its metadata cannot be understood"):
        Checkpoint(file.parent)


def resummed(plane: str, change: Callable[[Tensor], None]) -> Change:
    """A plane that is wrong, with the right sums of what is wrong."""

    def rewritten(planes: Planes, said: dict[str, Any]) -> None:
        planes[plane] = planes[plane].clone()
        change(planes[plane])
        if plane in said["pieces"]:
            said["pieces"][plane] = sums_of(raw(planes[plane]), 4096)

    return rewritten


@pytest.mark.parametrize(
    "change",
    [
        lambda positions: positions[:2].fill_(5),
        lambda positions: positions.copy_(positions.flip(0)),
        lambda positions: positions[-1].fill_(40 * 256),
        lambda positions: positions[0].fill_(-1),
    ],
    ids=["twice", "descending", "behind", "before"],
)
def test_escapes_that_do_not_ascend_within_the_matrix_are_refused(file: Path, change: Any) -> None:
    rewrite(file, resummed("wide.escape_positions", change))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: wide has escapes at no places of it"):
        read(file.parent)


@pytest.mark.parametrize("base", [1, 240, 255])
def test_bases_that_are_none_are_refused(file: Path, base: int) -> None:
    rewrite(file, resummed("wide.bases", lambda bases: bases[7].fill_(base)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: wide has bases that are none: compress its model"):
        read(file.parent)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_rows_of_zeros_come_back_with_their_signs(file: Path, level: CompressionLevel, device: torch.device) -> None:
    changed = originals()
    changed["wide"][3:20] = 0.0
    changed["wide"][4, 5:9] = -0.0
    write_coded(file, changed, level)
    found = numbers(read(file.parent, device))["both"]
    assert bits(found[:40]).equal(bits(changed["wide"]))


def test_an_escape_that_is_too_large_for_float16_is_refused(file: Path) -> None:
    checkpoint = Checkpoint(file.parent)
    formats = select_formats(TABLE, checkpoint.tensors, torch.float16, GPU)
    with pytest.raises(CheckpointError, match=r"wide, stored as BF12, has 1 values .* as torch\.float16"):
        load_tensors(checkpoint.tensors, TABLE, formats, CPU, lambda: None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_an_escape_that_is_not_finite_is_refused(
    file: Path, level: CompressionLevel, value: float, device: torch.device
) -> None:
    changed = originals()
    changed["wide"][3, 4:6] = value
    write_coded(file, changed, level)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: wide has 2 values that are not finite"):
        read(file.parent, device)


@pytest.mark.parametrize(
    "change",
    [
        lambda ends: ends[0].fill_(0),
        lambda ends: ends[0].fill_(1 << 40),
        lambda ends: ends[-1].add_(4000),
        lambda ends: ends.neg_(),
    ],
    ids=["empty", "descending", "behind", "before"],
)
def test_frames_that_do_not_fit_are_refused(tmp_path: Path, change: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_coded(tmp_path / "model.safetensors", originals(), CompressionLevel.DISTRIBUTION)
    rewrite(tmp_path / "model.safetensors", resummed("wide.high_ends", change))
    with pytest.raises(CheckpointError, match=r"wide has frames that do not fit: get the file again"):
        read(tmp_path)


def test_frames_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    write_coded(path, originals(), CompressionLevel.DISTRIBUTION)
    rewrite(path, lambda planes, said: planes["wide.high"].__setitem__(slice(0, 4), 0))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: wide has a frame .*: get the file again"):
        read(tmp_path)
    write_coded(path, originals(), CompressionLevel.DISTRIBUTION)
    other = originals() | {"wide": originals()["wide"].flip(0)}
    write_coded(tmp_path / "other", other, CompressionLevel.DISTRIBUTION)
    frames: dict[str, Tensor] = {}
    rewrite(tmp_path / "other", lambda planes, said: frames.update(planes))
    rewrite(path, lambda planes, said: planes.update({name: frames[name] for name in ("wide.high", "wide.high_ends")}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: wide is not as it was written, within what begins"):
        read(tmp_path)


def test_a_byte_that_is_altered_anywhere_is_found_or_does_no_harm(file: Path) -> None:
    content, dice, refused = file.read_bytes(), random.Random(11), 0
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    runs = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    regions = [(0, 8), (8, 8 + length), *((8 + length + first, 8 + length + last) for first, last in runs)]
    trials = [dice.randrange(first, last) for first, last in regions for _ in range(20) if last > first]
    trials += [dice.randrange(8, 8 + length) for _ in range(60)]
    for number, place in enumerate(trials):
        altered = bytearray(content)
        altered[place] ^= 1 << dice.randrange(8)
        file.write_bytes(altered)
        try:
            found = read(file.parent, (CPU, GPU)[number % 2])
        except CheckpointError:
            refused += 1
        else:
            assert same(found), f"seed 11, trial {number}: byte {place} was altered and nobody saw it"
    assert refused > 0.8 * len(trials)


def test_a_file_that_is_cut_short_at_any_boundary_is_refused(file: Path) -> None:
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    ends = {8 + length + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    for end in sorted({0, 4, 8, 100, 8 + length, *ends} | {end - 1 for end in ends}):
        if end == len(content):
            continue
        file.write_bytes(content[:end])
        with pytest.raises(CheckpointError, match=r"cut short|no safetensors file"):
            Checkpoint(file.parent)
    file.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="added to"):
        Checkpoint(file.parent)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_files_of_a_folder_may_be_of_any_level_or_none(tmp_path: Path, device: torch.device) -> None:
    tensors = originals()
    index = {name: f"{name}.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text("{}")
    for name, found in (
        ("wide", CompressionLevel.DEVICE),
        ("low", CompressionLevel.DISTRIBUTION),
        ("bias", CompressionLevel.DEVICE),
    ):
        write_coded(tmp_path / f"{name}.safetensors", {name: tensors[name]}, found)
    for name in ("norm", "kept"):
        save_file({name: tensors[name]}, tmp_path / f"{name}.safetensors")
    assert same(read(tmp_path, device))
    revision = Checkpoint(tmp_path).revision()
    save_file({"norm": tensors["norm"] + 1}, tmp_path / "norm.safetensors")
    assert Checkpoint(tmp_path).revision() != revision, "a file without sums is digested"


def test_tensors_that_were_left_as_they_are_make_their_parameter_plain(file: Path, level: CompressionLevel) -> None:
    write_coded(file, originals(), level, coded=lambda name, tensor: codable(name, tensor) and name != "low")
    found = read(file.parent)
    assert found["both"].dtype is torch.bfloat16
    assert same(found)


def test_sources_with_other_bases_lie_below_each_other(file: Path, level: CompressionLevel) -> None:
    bases: list[Tensor] = []

    def lower(weight: Tensor) -> Tensor:
        bases.append(choose_bases(weight) - 2 * len(bases))
        return bases[-1]

    write_coded(file, originals(), level, bases=lower)
    assert len({int(bases_N.max()) for bases_N in bases}) == 2
    assert same(read(file.parent))


def test_a_tensor_may_be_all_escapes(file: Path, level: CompressionLevel) -> None:
    write_coded(file, originals(), level, bases=lambda weight: torch.full((len(weight),), 2, dtype=torch.uint8))
    stored = Checkpoint(file.parent).tensors["wide"]
    assert stored.bf12 is not None
    assert stored.bf12[bf12_metadata.Plane.VALUES].numbers > 10_000
    assert same(read(file.parent))
    assert same(read(file.parent, CPU))


def test_a_shape_that_the_model_does_not_have_is_named(file: Path) -> None:
    checkpoint = Checkpoint(file.parent)
    first, *others = TABLE[0].sources
    changed = replace(TABLE[0], sources=(replace(first, shape=(41, 256)), *others))
    with pytest.raises(CheckpointError, match=r"wide is \[40, 256\], config\.json means \[41, 256\]"):
        checkpoint.require([changed, *TABLE[1:]], lambda name: False)
