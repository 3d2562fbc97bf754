"""engine/gguf/reader.py: it reads what the library wrote, and refuses by name what claims more than there is."""

import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from engine.gguf import reader
from engine.gguf.reader import GgufError, read_gguf
from tests.support.gguf_files import finish, write_model
from tests.support.small_models import reference_model

U8, U32, F32, STRING, ARRAY = 0, 4, 6, 8, 9
HUGE = 1 << 63


def text(content: str | bytes, length: int | None = None) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str, kind: int, content: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + content


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def write(
    path: Path,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    start: bytes = b"GGUF\x03\0\0\0",
    counts: tuple[int, int] | None = None,
) -> Path:
    """A file of these keys, tensors and bytes of tensors, which claims `counts` of them where they are given."""
    content = start + struct.pack("<QQ", *(counts or (len(tensors), len(keys)))) + b"".join((*keys, *tensors))
    path.write_bytes(content + bytes(-len(content) % 32) + data)
    return path


def test_what_the_library_writes_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", reference_model("llama 3.1"), GGMLQuantizationType.Q4_1)
    ours, theirs = read_gguf(file), GGUFReader(file)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert (own.type, own.first, own.last - own.first) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert own.shape == tuple(reversed(tensor.shape.tolist()))
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for name, value in fields.items():
        assert ours.metadata[name] == (pytest.approx(value, 1e-6) if isinstance(value, float) else value)


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    values: dict[str, tuple[str, Any]] = {
        "uint8": ("a", 200), "int8": ("b", -100), "uint16": ("c", 60_000), "int16": ("d", -30_000),
        "uint32": ("e", 4_000_000_000), "int32": ("f", -2_000_000_000), "float32": ("g", 1e-5), "bool": ("h", True),
        "string": ("i", "größe"), "uint64": ("j", 1 << 63), "int64": ("k", -(1 << 62)), "float64": ("l", math.pi),
    }  # fmt: skip
    for kind, (name, value) in values.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.add_array("m", ["a", "", "c"])
    writer.add_array("n", [0.1, -2.5])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(12, dtype=np.float16).reshape(3, 4))
    file = read_gguf(finish(writer, tmp_path / "model.gguf"))
    assert {name: file.metadata[name] for name, _ in values.values()} == dict(values.values())
    assert (file.metadata["m"], file.metadata["n"]) == (["a", "", "c"], [0.1, -2.5])
    assert (file.tensors["t"].shape, file.tensors["t"].first % 64) == ((3, 4), 0)


GOOD = key("general.name", STRING, text("x"))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such file's start": ({"start": b"PK\x03\x04\0\0\0\0"}, "does not begin with those letters"),
    "another version": ({"start": b"GGUF\x01\0\0\0"}, "of GGUF version 1; 2 and 3"),
    "big-endian": ({"start": b"GGUF\0\0\0\x03"}, "big-endian"),
    "tensors without end": ({"counts": (HUGE, 0)}, "claims 9,223,372,036,854,775,808 tensors, and 65,536 is the most"),
    "keys without end": ({"counts": (0, HUGE)}, "claims 9,223,372,036,854,775,808 keys"),
    "more keys than there are": ({"keys": (GOOD,), "counts": (0, 9)}, "twice|cut short or damaged"),
    "more tensors than there are": ({"counts": (60_000, 0)}, "cut short or damaged"),
    "a text without end": ({"keys": (key("a", STRING, text("x", HUGE)),)}, "a at byte .* claims 9,223,372,036"),
    "a text behind the end": ({"keys": (key("a", STRING, text("x", 5_000_000)),)}, "would end behind its end"),
    "a text that is none": ({"keys": (key("a", STRING, text(b"\xff\xfe")),)}, "no UTF-8 text"),
    "a name without end": ({"keys": (text("", HUGE),)}, "a key at byte .* claims"),
    "one key twice": ({"keys": (GOOD, GOOD)}, "general.name twice"),
    "a list without end": ({"keys": (key("a", ARRAY, array(U8, HUGE)),)}, "claims 9,.*,808 items of a"),
    "a list behind the end": ({"keys": (key("a", ARRAY, array(F32, 4_000_000)),)}, "a at byte .* would end behind"),
    "texts behind the end": ({"keys": (key("a", ARRAY, array(STRING, 4_000_000)),)}, "would end behind its end"),
    "lists in lists": ({"keys": (key("a", ARRAY, array(ARRAY, 1, array(U8, 1, b"x"))),)}, "arrays in arrays"),
    "an unknown kind": ({"keys": (key("a", 77, b"\0" * 16),)}, "a is of type 77"),
    "an alignment of 0": ({"keys": (key("general.alignment", U32, bytes(4)),)}, "general.alignment is 0"),
    "an odd alignment": ({"keys": (key("general.alignment", U32, b"\x21\0\0\0"),)}, "general.alignment is 33"),
    "a huge alignment": ({"keys": (key("general.alignment", U32, b"\0\0\0\x40"),)}, "general.alignment is 1073741824"),
    "an alignment that is none": ({"keys": (key("general.alignment", STRING, text("x")),)}, "general.alignment is 'x'"),
    "no dimensions": ({"tensors": (tensor("t", ()),)}, "t has 0 dimensions"),
    "dimensions without end": ({"tensors": (tensor("t", (4,), dimensions=1 << 31),)}, "t has 2147483648 dimensions"),
    "a side of 0": ({"tensors": (tensor("t", (0, 4)),), "data": bytes(64)}, r"t of shape \[4, 0\]"),
    "a size that wraps": ({"tensors": (tensor("t", (1 << 62, 16)),), "data": bytes(64)}, "is cut short: t would end"),
    "an unknown type": ({"tensors": (tensor("t", (32,), 199),), "data": bytes(64)}, "type of number 199"),
    "half a block": ({"tensors": (tensor("t", (33,), 8),), "data": bytes(64)}, "no whole blocks of Q8_0"),
    "past the end": ({"tensors": (tensor("t", (32,)),), "data": bytes(96)}, "is cut short: t would end at byte"),
    "an offset past the end": ({"tensors": (tensor("t", (4,), 0, 1 << 40),), "data": bytes(96)}, "is cut short"),
    "an odd offset": ({"tensors": (tensor("t", (4,), 0, 8),), "data": bytes(96)}, "no multiple of 32"),
    "one on another": (
        {"tensors": (tensor("t", (16,)), tensor("u", (4,), 0, 32)), "data": bytes(96)}, "u lies on another tensor",
    ),
    "one name twice": (
        {"tensors": (tensor("t", (4,)), tensor("t", (4,), 0, 32)), "data": bytes(96)}, "tensors have one name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_claims_more_than_there_is_is_refused_by_name_and_takes_no_memory(what: str, tmp_path: Path) -> None:
    parts, said = BAD[what]
    file = write(tmp_path / "bad.gguf", **parts)
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match=said) as refused:
            read_gguf(file)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert str(file) in str(refused.value)


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = write_model(tmp_path / "model.gguf", reference_model("qwen2")).read_bytes()
    for size in [*range(60), *range(60, len(content), 9973), len(content) - 40]:
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(GgufError, match=r"cut short|no GGUF file"):
            read_gguf(tmp_path / "cut.gguf")


def test_a_header_has_a_longest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "model.gguf", (key("a", STRING, text("x" * 1000)),))
    assert read_gguf(file).metadata == {"a": "x" * 1000}
    monkeypatch.setattr(reader, "_HEADER_BYTES_MAX", 900)
    with pytest.raises(GgufError, match="behind its end"):
        read_gguf(file)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(GgufError, match=said):
            read_gguf(path)
