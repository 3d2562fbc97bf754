"""`hearth models add` and `remove`: what can be served joins the catalogue, and what cannot is refused by name."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.hostinfo import gpus
from engine.hostinfo.gpus import Gpu
from gateway.catalogue.catalogue import model_entries, open_catalogue
from gateway.catalogue.checksums import SUMS_NAME, write_sums
from gateway.cli import main
from gateway.commands.model_tools import add
from gateway.commands.model_tools.size import sizes_of
from gateway.settings.config import ModelEntryConfig, SettingsError, load_config
from tests.support import minilm
from tests.support.tiny_model import HIDDEN, tensors, write_tiny

NAME = "@cf/acme/assistant"
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model's, below an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(add, "try_prompt", lambda *_: None)  # test_trial.py has it run
    return write_tiny(tmp_path / "assistant")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What it says; nothing joined the catalogue, and nothing is left behind."""
    capsys.readouterr()
    assert main(["models", "add", *words]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert [entry.name for entry in model_entries(load_config())] == ["@cf/hearth/ember"]
    assert not list(Path(".hearth").glob("added/**/*.*"))
    return said


def test_a_whole_folder_joins_the_catalogue_with_its_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pinned", "--priority", "2.5", "--replicas", "2", "--description", 'It says "hi"\t\x7f')
    assert main(["models", "add", NAME, "assistant", *words]) == 0
    assert "whole; there is no SHA256SUMS to compare with" in capsys.readouterr().out
    entry = model_entries(load_config())[-1]
    assert (entry.name, entry.folder, entry.pinned) == (NAME, str(folder), True)
    assert (entry.priority, entry.replicas, entry.description) == (2.5, 2, 'It says "hi"\t\x7f')
    catalogue = open_catalogue(load_config())
    assert (catalogue.find(NAME) is not None, catalogue.problems) == (True, {})
    assert main(["models", "list", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["@cf/hearth/ember", NAME]


def test_a_removed_model_is_gone_and_its_folder_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", NAME, str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared_files"] == 0
    assert main(["models", "remove", NAME]) == 0
    assert [entry.name for entry in model_entries(load_config())] == ["@cf/hearth/ember"]
    assert (folder / "model.safetensors").exists()
    for name in (NAME, "../../x"):
        assert main(["models", "remove", name]) == 1
        assert "has no" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["@cf/hearth/ember", "@hf/org/model"])
def test_what_was_not_added_is_removed_and_brought_back_and_its_folder_stays(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(folder, ".hearth/models/org/model")
    before = model_entries(load_config())
    assert main(["models", "remove", name.rpartition("/")[2]]) == 0
    assert f"hearth models set {name} --serve" in capsys.readouterr().out
    assert [entry.name for entry in model_entries(load_config())] == [one.name for one in before if one.name != name]
    assert main(["models", "remove", name]) == 1
    assert "already" in capsys.readouterr().err
    assert main(["models", "set", name, "--serve"]) == 0
    assert model_entries(load_config()) == before
    assert Path(".hearth/models/org/model/config.json").exists()


def test_settings_are_changed_one_by_one_and_taken_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", NAME, "assistant", "--price-input", "10", "--alias", "gpt-4o,helper"]) == 0
    assert main(["models", "set", "helper", "--price-output", "20.5", "--context-tokens", "512", "--pinned"]) == 0
    entry = model_entries(load_config())[-1]
    assert (entry.price.input, entry.price.output, entry.aliases) == (10.0, 20.5, ["gpt-4o", "helper"])
    assert (entry.context_tokens, entry.pinned, entry.folder) == (512, True, str(folder))
    words = ("--price-input", "none", "--context-tokens", "none", "--alias", "none", "--no-pinned")
    assert main(["models", "set", "assistant", *words]) == 0
    entry = model_entries(load_config())[-1]
    assert (entry.price.input, entry.price.output, entry.aliases) == (1000.0, 20.5, [])
    assert (entry.context_tokens, entry.pinned) == (None, False)
    capsys.readouterr()
    for words, said in (
        (("assistant",), "say what to change"),
        (("asistant", "--pinned"), f"did you mean {NAME}?"),
        (("assistant", "--context-tokens", "100000"), "is more than the model's"),
        (("assistant", "--price-input", "5", "--price-cached-input", "6"), "price"),
        (("assistant", "--replicas", "0"), "replicas"),
        (("assistant", "--alias", "@cf/hearth/ember"), "a name of @cf/hearth/ember"),
        (("assistant", "--alias", "a b"), "aliases"),
    ):
        assert main(["models", "set", *words]) == 1, words
        assert said in capsys.readouterr().err
    assert model_entries(load_config())[-1] == entry


def test_what_hearth_toml_says_is_changed_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hearth.toml").write_text(f'[[models]]\nname = "{NAME}"\nfolder = "assistant"\n')
    for words in (["set", "assistant", "--pinned"], ["remove", "assistant"]):
        assert main(["models", *words]) == 1
        assert "hearth.toml" in capsys.readouterr().err


def test_an_alias_that_is_another_models_name_is_refused_wherever_it_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the alias @cf/hearth/ember" in refused(capsys, NAME, "assistant", "--alias", "@cf/hearth/ember")
    assert "its own name" in refused(capsys, "helper", "assistant", "--alias", "helper")
    assert main(["models", "add", NAME, "assistant"]) == 0
    Path("hearth.toml").write_text(f'[[models]]\nname = "@cf/hearth/ember"\naliases = ["{NAME}"]\n')
    with pytest.raises(SettingsError, match=f"the alias {NAME} of @cf/hearth/ember is a name of {NAME}"):
        model_entries(load_config())


def test_a_name_that_takes_a_short_one_away_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "@cf/acme/ember", "assistant"]) == 0
    assert "ember alone finds none of @cf/hearth/ember, @cf/acme/ember" in capsys.readouterr().out


def test_hearth_toml_goes_before_what_was_added_and_may_leave_the_folder_out(folder: Path) -> None:
    assert main(["models", "add", NAME, str(folder), "--pinned"]) == 0
    Path("hearth.toml").write_text(f'[[models]]\nname = "{NAME}"\nreplicas = 3\n')
    entry = model_entries(load_config())[-1]
    assert (entry.folder, entry.replicas, entry.pinned) == (str(folder), 3, False)
    Path("hearth.toml").write_text(f'[[models]]\nname = "{NAME}"\nserve = false\n')
    assert [entry.name for entry in model_entries(load_config())] == ["@cf/hearth/ember"]


def test_settings_of_hearth_toml_may_wait_for_their_folder_and_are_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f'[[models]]\nname = "{NAME}"\n'
    Path("hearth.toml").write_text(f"{said}context_tokens = 2048\n")
    assert main(["models", "add", NAME, "assistant"]) == 1
    assert "context_tokens 2048 is more than" in capsys.readouterr().err
    Path("hearth.toml").write_text(f"{said}context_tokens = 512\n")
    assert main(["models", "add", NAME, "assistant"]) == 0
    entry = model_entries(load_config())[-1]
    assert (entry.folder, entry.context_tokens) == (str(folder), 512)


def test_a_folder_whose_name_is_no_text_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.rename(folder.with_name("assistant-\udcff"))
    assert "was not added" in refused(capsys, NAME, "assistant-\udcff")


def test_a_name_that_no_file_can_have_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be written: File name too long" in refused(capsys, f"@cf/acme/{'long' * 80}", "assistant")


def test_a_folder_whose_sizes_cannot_be_is_listed_with_its_problem(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, num_attention_heads=0, head_dim=None)
    Path("hearth.toml").write_text(f'[[models]]\nname = "{NAME}"\nfolder = "assistant"\n')
    assert main(["models", "list"]) == 0
    assert "no config.json that can be read" in capsys.readouterr().out
    shutil.rmtree("assistant")
    assert main(["models", "list"]) == 0
    assert "there is no folder" in capsys.readouterr().out


def test_a_name_that_is_taken_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hearth.toml").write_text(
        '[[models]]\nname = "@cf/hearth/ember"\naliases = ["@cf/acme/fire"]\n'
        f'[[models]]\nname = "{NAME}"\nfolder = "elsewhere"\nserve = false\n'
    )
    assert "has @cf/hearth/ember already" in refused(capsys, "@cf/hearth/ember", "assistant")
    assert "another name of @cf/hearth/ember" in refused(capsys, "@cf/acme/fire", "assistant")
    assert "already; `hearth models set` changes it" in refused(capsys, NAME, "assistant")


def test_a_file_that_somebody_broke_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", NAME, "assistant"]) == 0
    (kept,) = Path(".hearth/added").glob("**/*.toml")
    for content in ("x =", 'name = "@cf/a/b"\nprot = 1\n'):
        kept.write_text(content)
        with pytest.raises(SettingsError, match=r"assistant\.toml"):
            model_entries(load_config())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["@cf/", "assistant"], "'@cf/' is no name of a model; one is like @cf/acme/notes"),
        ([NAME, "nowhere"], "there is no folder"),
        ([NAME, "assistant/config.json"], "is a file"),
        ([NAME, "assistant", "--replicas", "0"], "replicas"),
        ([NAME, "assistant", "--priority", "high"], "priority"),
        ([NAME, "assistant", "--context-tokens", "2048"], "context_tokens 2048 is more than the model's 1024"),
        ([NAME, "assistant", "--task", "Text Classification"], "no head that scores"),
    ],
)
def test_words_that_cannot_be_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, *words)


# ---- bad folders ----------------------------------------------------------------------------------------------------


def change(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


def shard(folder: Path) -> None:
    index = {
        "weight_map": {"model.norm.weight": "model-1.safetensors", "model.embed_tokens.weight": "model-2.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def shortened(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def longer_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])


def larger_tokenizer(folder: Path) -> None:
    vocabulary = 64
    change(folder, vocab_size=vocabulary)
    rewrite(folder, lambda found: found.update(tensors(vocabulary)))


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
    "JSON without end": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
    "nested index": (
        lambda folder: (
            (folder / "model.safetensors").rename(folder / "other.safetensors"),
            (folder / "model.safetensors.index.json").write_text("[" * 100_000),
        ),
        "is no index of safetensors files",
    ),
    "no object": (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
    "architecture": (lambda folder: change(folder, architectures=["GPT2LMHeadModel"]), "Qwen3ForCausalLM"),
    "architectures": (lambda folder: change(folder, architectures=5), "XLMRobertaModel"),
    "quantised": (lambda folder: change(folder, quantization_config={"bits": 4}), "quantization_config"),
    "odd sizes": (lambda folder: change(folder, num_hidden_layers="many"), "num_hidden_layers"),
    "odd entry": (lambda folder: change(folder, rope_scaling=[1]), "rope scaling must be an object"),
    "endless layers": (lambda folder: change(folder, num_hidden_layers=10**6), "tensors for the 1000000 layers"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickle": (pickled, "pickle"),
    "shard": (shard, "names 'model-2.safetensors'"),
    "tensor": (lambda folder: rewrite(folder, lambda found: found.pop("model.norm.weight")), "lacks model.norm.weight"),
    "shape": (lambda folder: change(folder, intermediate_size=33), "config.json means [33, 16]"),
    "dtype": (
        lambda folder: rewrite(folder, lambda found: found.update({"model.norm.weight": np.ones(HIDDEN, np.int32)})),
        "model.norm.weight has dtype I32",
    ),
    "cut short": (shortened, "cut short"),
    "header": (longer_header, "no safetensors file"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "a broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "is no tokenizer"),
    "another's tokenizer": (larger_tokenizer, "config.json has a vocabulary of 64"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_is_refused_by_what_is_wrong_and_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    spoil, said = BAD[fault]
    spoil(folder)
    told = refused(capsys, NAME, "assistant")
    assert said in told
    assert f"{NAME} was not added" in told
    assert "\n  -> " in told


def test_an_encoder_is_looked_at_as_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(minilm.folder(), "minilm")
    assert main(["models", "add", "@cf/acme/vectors", "minilm"]) == 0
    change(Path("minilm"), intermediate_size=1537)
    capsys.readouterr()
    assert main(["models", "add", "@cf/acme/others", "minilm"]) == 1
    assert "config.json means [1537, 384]" in capsys.readouterr().err


# ---- too large ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_bytes", "words", "helps"),
    [
        (180_000, [], ["set context_tokens to at most", "raise machine.device_bytes to at least"]),
        (1_000, [], ["raise machine.device_bytes"]),
        (250_000, ["--dtype", "float32"], ['dtype = "bfloat16"']),
    ],
)
def test_a_model_larger_than_any_device_is_refused_with_what_would_help(
    folder: Path, capsys: pytest.CaptureFixture[str], device_bytes: int, words: list[str], helps: list[str]
) -> None:
    Path("hearth.toml").write_text(f"[machine]\ndevice_bytes = {device_bytes}\n")
    said = refused(capsys, NAME, "assistant", *words)
    assert "for a context of 1,024 tokens are" in said
    for help in helps:
        assert help in said


def test_a_model_fits_once_what_was_said_to_help_is_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hearth.toml").write_text("[machine]\ndevice_bytes = 180000\n")
    said = refused(capsys, NAME, "assistant")
    most = said.split("context_tokens to at most ")[1].split()[0]
    assert "context_tokens" in refused(capsys, NAME, "assistant", "--context-tokens", str(int(most) + 1))
    assert main(["models", "add", NAME, "assistant", "--context-tokens", most]) == 0


def test_windows_let_a_longer_context_fit(folder: Path) -> None:
    change(folder, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)
    sizes = sizes_of(load_config(), ModelEntryConfig(name=NAME, folder="assistant"))
    assert sizes is not None
    whole = sizes.context_tokens * sizes.kv_bytes_per_token
    assert sizes.kv_bytes_of_a_context < whole / 4, "all layers see a window"
    assert sizes.kv_bytes_of(64) == 64 * sizes.kv_bytes_per_token


def test_the_largest_gpu_counts_and_fp8_may_help(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        Gpu(index, "", "Small", size, size, "580", (9, 0)) for index, size in enumerate((GIB + 1_000, GIB + 180_000))
    ]
    monkeypatch.setattr(gpus, "installed_gpus", lambda: found)
    monkeypatch.setattr(gpus, "torch_cuda_version", lambda: "13.0")
    said = refused(capsys, NAME, "assistant")
    assert "175.8 KiB of Small" in said
    assert 'set kv_dtype = "fp8"' in said
    assert main(["models", "add", NAME, "assistant", "--kv-dtype", "fp8"]) == 0


# ---- checksums ------------------------------------------------------------------------------------------------------


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_files_that_are_what_their_sums_say_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sums(folder, sums(folder))
    assert main(["models", "add", NAME, "assistant"]) == 0
    assert "4 files are what SHA256SUMS says" in capsys.readouterr().out


def test_one_changed_bit_is_found_and_the_file_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sums(folder, sums(folder))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    said = refused(capsys, NAME, "assistant")
    assert "model.safetensors is damaged" in said
    (folder / SUMS_NAME).write_text("nonsense\n")
    assert "line 1 is none of sha256sum's" in refused(capsys, NAME, "assistant")
