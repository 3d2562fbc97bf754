"""engine/gguf/convert.py: the folder has the model that the file has, in every family and type, whole or not at all."""

import errno
import json
import os
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from engine.compression.target import PARTIAL_SUFFIX, TargetError
from engine.gguf import convert
from engine.gguf.convert import import_file
from engine.gguf.reader import GgufError
from engine.protocol.types import SamplingParams
from engine.weights.checkpoint import Checkpoint
from tests.support.gguf_files import write_model
from tests.support.small_models import FAMILIES, Text, logits, open_small, reference_model, shuffled_tables

pytestmark = pytest.mark.usefixtures("inference")

INEXPRESSIBLE = ("qwen2 window", "qwen3 biases window")  # GGUF has no words for them
IMPORTED = [name for name in FAMILIES if name.split()[0] in ("llama", "mistral", "qwen2", "qwen3")]
TYPES = GGMLQuantizationType
# How far a number may be from the original, as a share of the largest of its block.
SHARES = {
    TYPES.F32: 0.0, TYPES.BF16: 0.0, TYPES.F16: 2**-11, TYPES.Q8_0: 0.5 / 127, TYPES.Q4_0: 1 / 8, TYPES.Q4_1: 1 / 15,
    TYPES.Q5_0: 1 / 16, TYPES.Q5_1: 1 / 31,
}  # fmt: skip
BF16_SHARE = 2**-8


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The model with numbers that bfloat16 has."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.mark.parametrize("family", sorted(set(IMPORTED) - set(INEXPRESSIBLE)))
def test_every_family_is_imported_bit_for_bit_and_answers_as_the_reference_library(family: str, tmp_path: Path) -> None:
    reference = rounded(reference_model(family))
    folder = tmp_path / "made"
    report = import_file(write_model(tmp_path / "model.gguf", reference), folder)
    imported, original = load_file(folder / "model.safetensors"), reference.state_dict()
    if reference.config.tie_word_embeddings:
        del original["lm_head.weight"]
    assert imported.keys() == original.keys()
    assert all(torch.equal(imported[name].float(), original[name]) for name in original)
    assert report.tensors == len(original)
    model, rng = open_small(folder), np.random.default_rng(5)
    text = Text(rng.integers(0, 160, 300).tolist(), *shuffled_tables(model, [300], seed=1))
    with torch.no_grad():
        expected = reference(torch.tensor([text.ids])).logits[0, -1]
    assert (logits(model, [text.slice(300, SamplingParams())])[0] - expected).abs().max() <= 1e-4
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert (again(torch.tensor([text.ids])).logits[0, -1] - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", SHARES, ids=lambda kind: kind.name)
def test_every_type_is_within_its_own_error_of_the_original(kind: TYPES, tmp_path: Path) -> None:
    reference = reference_model("llama 3.2 tied")
    import_file(write_model(tmp_path / "model.gguf", reference, kind), tmp_path / "made")
    imported = load_file(tmp_path / "made" / "model.safetensors")
    block, _ = GGML_QUANT_SIZES[kind]
    for name, number in imported.items():
        original = reference.state_dict()[name]
        within = (number.float() - original).abs() <= BF16_SHARE * original.abs() + 1e-30
        if original.ndim == 2:
            largest = original.view(-1, block).abs().amax(1, keepdim=True).expand(-1, block).reshape(original.shape)
            within = (number.float() - original).abs() <= SHARES[kind] * 1.01 * largest + BF16_SHARE * largest + 1e-7
        assert within.all(), name


def _k_scales(packed: bytes) -> list[tuple[int, int]]:
    """The eight scales and minima of 6 bits in 12 bytes."""
    low = [(packed[i] & 63, packed[i + 4] & 63) for i in range(4)]
    high = [
        ((packed[i + 8] & 15) | packed[i] >> 6 << 4, packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4) for i in range(4)
    ]
    return low + high


def _k_block(kind: TYPES, block: bytes) -> list[float]:
    """A block of 256 numbers, one by one, as ggml's structs are commented."""
    half = np.frombuffer(block, np.float16)
    if kind is TYPES.Q6_K:
        low, high, scales, scale = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), float(half[-1])
        numbers = []
        for i in range(256):
            part, column = i // 128, i % 32
            quarter = i % 128 // 32
            nibble = low[64 * part + 32 * (quarter % 2) + column] >> 4 * (quarter // 2) & 15
            number = nibble | (high[32 * part + column] >> 2 * quarter & 3) << 4
            numbers.append(scale * int(scales[i // 16]) * (number - 32))
        return numbers
    scale, minimum, scales = float(half[0]), float(half[1]), _k_scales(block[4:16])
    fifth, low = (block[16:48], block[48:]) if kind is TYPES.Q5_K else (bytes(32), block[16:])
    numbers = []
    for i in range(256):
        (factor, offset), shift = scales[i // 32], 4 * (i // 32 % 2)
        number = (low[i // 64 * 32 + i % 32] >> shift & 15) + (fifth[i % 32] >> i // 32 & 1) * 16
        numbers.append(scale * factor * number - minimum * offset)
    return numbers


@pytest.mark.parametrize("kind", [TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K], ids=lambda kind: kind.name)
def test_types_of_large_blocks_are_what_their_bytes_mean(kind: TYPES, tmp_path: Path) -> None:
    """Nothing writes them but llama.cpp: the blocks are random bytes under scales that are numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    reference = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=32, tie_word_embeddings=True))
    rng, (_, size) = np.random.default_rng(3), GGML_QUANT_SIZES[kind]
    blocks_NB = rng.integers(0, 256, (96, size), dtype=np.uint8)
    scales = slice(208, 210) if kind is TYPES.Q6_K else slice(0, 4)
    blocks_NB[:, scales] = (
        rng.uniform(-0.01, 0.01, (96, (scales.stop - scales.start) // 2)).astype("<f2").view(np.uint8)
    )
    raw = {"blk.0.ffn_gate.weight": (blocks_NB, kind)}
    import_file(write_model(tmp_path / "model.gguf", reference, raw=raw), tmp_path / "made")
    expected = torch.tensor([_k_block(kind, block.tobytes()) for block in blocks_NB])
    imported = load_file(tmp_path / "made" / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    assert ((imported.float() - expected).abs() <= BF16_SHARE * expected.abs() + 1e-6).all()
    assert len(imported.unique()) > 1000


def test_a_large_model_is_in_shards_and_pieces_that_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_model(tmp_path / "model.gguf", reference_model("llama biases"), TYPES.Q8_0)
    import_file(file, tmp_path / "whole")
    monkeypatch.setattr(convert, "_PIECE_NUMBERS", 700)
    report = import_file(file, tmp_path / "cut", shard_bytes=30_000)
    whole, cut = Checkpoint(tmp_path / "whole"), Checkpoint(tmp_path / "cut")
    assert len(cut.paths) > 5
    assert all(path.stat().st_size < 40_000 for path in cut.paths)
    assert cut.bytes == whole.bytes == report.bytes_after
    numbers = {name: number for path in cut.paths for name, number in load_file(path).items()}
    assert all(torch.equal(number, numbers[name]) for name, number in load_file(whole.paths[0]).items())


def test_memory_is_bounded_by_a_piece_and_not_by_a_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    large = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=90_000, tie_word_embeddings=True))
    file = write_model(tmp_path / "model.gguf", large, TYPES.F16)
    del large
    read_pipe, write_pipe = os.pipe()
    if (child := os.fork()) == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        import_weights_alone(file, tmp_path / "made")
        os.write(write_pipe, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(read_pipe, 100)) < 40 << 10  # KiB, the vocabulary's included; a table of 88 MiB is expanded


def test_a_folder_that_has_something_is_refused_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", reference_model("qwen2"))
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match="exists: name a folder that does not"):
        import_file(file, folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    import_file(file, folder)
    assert (folder / "config.json").exists()


def test_the_folder_in_which_one_is_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "model.gguf", reference_model("qwen2"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(TargetError, match="exists: name a folder that does not"):
        import_file(file, Path())
    assert (tmp_path / "here").is_dir()


def test_a_disk_that_fills_at_any_moment_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "model.gguf", reference_model("qwen2"))
    calls, fails, sync = 0, -1, os.fsync

    def fsync(opened: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(opened)

    monkeypatch.setattr(os, "fsync", fsync)
    import_file(file, tmp_path / "made")
    assert calls >= 6
    for fails in range(1, calls):  # noqa: B007  the last is after the folder is there
        calls = 0
        with pytest.raises(TargetError, match="cannot be written: No space left"):
            import_file(file, tmp_path / "again")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model.gguf"]


def test_what_a_killed_import_leaves_is_no_model_and_the_next_takes_its_place(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", reference_model("qwen2"))
    if (child := os.fork()) == 0:
        convert._write_texts = lambda *_: os._exit(9)  # as it is killed before its last step
        import_file(file, tmp_path / "made")
    assert os.waitpid(child, 0)[1] != 0
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / f"made{PARTIAL_SUFFIX}" / "config.json").exists()
    import_file(file, tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model.gguf"]


def test_a_file_that_changes_or_holds_no_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = reference_model("qwen2")
    reference.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    with pytest.raises(GgufError, match=r"blk\.1\.ffn_up\.weight has numbers that are none"):
        import_file(write_model(tmp_path / "model.gguf", reference), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    raw = {"blk.0.ffn_up.weight": (np.zeros((96, 64), np.int8), TYPES.I8)}
    file = write_model(tmp_path / "model.gguf", reference_model("llama 2"), raw=raw)
    with pytest.raises(GgufError, match=r"has blk\.0\.ffn_up\.weight in I8; read are F32, F16"):
        import_file(file, tmp_path / "made")


def test_random_damage_is_refused_or_makes_a_folder_that_is_whole(tmp_path: Path) -> None:
    """Whatever bytes change, nothing but a named error is raised, and what is made has the right tensors."""
    content = write_model(tmp_path / "model.gguf", reference_model("qwen2"), TYPES.Q8_0).read_bytes()
    header = content.index(b"output_norm.weight") + 4096
    dice, refused = random.Random(11), 0
    for turn in range(120):
        damaged = bytearray(content)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(header)] = dice.randrange(256)
        file = tmp_path / f"{turn}.gguf"
        file.write_bytes(damaged[: dice.randrange(len(damaged))] if turn % 3 == 0 else damaged)
        try:
            import_file(file, tmp_path / f"made-{turn}")
            assert json.loads((tmp_path / f"made-{turn}" / "config.json").read_text())["model_type"] == "qwen2"
            Checkpoint(tmp_path / f"made-{turn}")
        except GgufError:
            refused += 1
            assert not (tmp_path / f"made-{turn}").exists()
    assert refused > 40


def import_weights_alone(file: Path, folder: Path) -> None:
    """Without the tokenizer, whose 90,000 tokens would be what is measured."""
    texts = convert.TokenizerFiles({}, {}, {"eos_token_id": [1]})
    convert.tokenizer_files = lambda *_: texts
    import_file(file, folder)
