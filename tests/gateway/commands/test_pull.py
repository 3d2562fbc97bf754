import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.bf12.metadata import CompressionLevel
from engine.compression.compress import compress_folder
from engine.compression.source import scan_folder
from engine.models.config import DECODER_ARCHITECTURES, ENCODER_ARCHITECTURES, HEADLESS
from engine.protocol.types import Pooling
from gateway.catalogue.bf12_size import read_bf12_size
from gateway.catalogue.catalogue import BUILT_IN, folder_of, open_catalogue
from gateway.catalogue.checksums import SUMS_NAME, read_sums, require_sums
from gateway.catalogue.tasks import ModelTask
from gateway.commands.pull import SERVED
from gateway.settings.config import Config, ModelEntryConfig, load_config
from tests.support import minilm
from tests.support.hub import COMMIT, Hub, serving
from tests.support.waiting import wait_for

EMBER = folder_of(Config(), ModelEntryConfig(name=BUILT_IN))
NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = bytes(range(256)) * 40_000  # 10 MB


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as found:
        small = {name: (EMBER / name).read_bytes() for name in NAMES if (EMBER / name).exists()}
        found.repositories["org/model"] = {**small, "model.safetensors": WEIGHTS, "README.md": b"# hello"}
        yield found


def pull(folder: Path, hub: Hub, *words: str, token: str | None = None) -> "subprocess.CompletedProcess[str]":
    """`hearth pull` as a user runs it, with this hub as HF_ENDPOINT."""
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    surroundings |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    if token is not None:
        surroundings["HF_TOKEN"] = token
    command = [sys.executable, "-m", "gateway.cli", "pull", *words]
    return subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=100)


def test_a_pulled_model_is_in_the_catalogue_with_only_what_it_needs(tmp_path: Path, hub: Hub) -> None:
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 0, done.stderr
    assert "@hf/org/model" in done.stdout
    assert "model.safetensors" in done.stderr, "the progress bar names the file"
    assert "100%" in done.stderr
    config = load_config(state_folder=tmp_path / ".hearth")
    model = open_catalogue(config).find("@hf/org/model")
    assert model is not None
    assert (model.folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (model.folder / "revision").read_text().strip() == COMMIT
    assert {path.name for path in model.folder.iterdir()} == {*NAMES, "model.safetensors", "revision", SUMS_NAME}
    sums = read_sums(model.folder)
    assert set(sums) == {*NAMES, "model.safetensors"}
    require_sums(model.folder, sums)
    assert not list((config.models_folder / ".partial").iterdir())


def test_what_is_pulled_is_what_the_engine_serves() -> None:
    assert {*DECODER_ARCHITECTURES, *HEADLESS, *ENCODER_ARCHITECTURES} == SERVED


def test_a_compressed_model_comes_as_it_is(tmp_path: Path, hub: Hub) -> None:
    compress_folder(scan_folder(EMBER), tmp_path / "packed", CompressionLevel.DISTRIBUTION, torch.device("cpu"))
    packed = {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir() if path.is_file()}
    hub.repositories["org/packed"] = packed
    assert pull(tmp_path, hub, "org/packed").returncode == 0
    config = load_config(state_folder=tmp_path / ".hearth")
    model = open_catalogue(config).find("@hf/org/packed")
    assert model is not None
    assert (model.folder / "model.safetensors").read_bytes() == packed["model.safetensors"]
    said = read_bf12_size(model.folder)
    assert said is not None
    assert said.level == "distribution"


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path: Path, hub: Hub) -> None:
    weights = WEIGHTS * 3
    hub.repositories["org/model"]["model.safetensors"] = weights
    hub.cut_after = len(weights) // 2
    part = tmp_path / ".hearth" / "models" / ".partial" / "org--model"
    first = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "pull", "org/model"],
        cwd=tmp_path,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:  # its connection was cut; before it tries again by itself, the whole process is killed
        wait_for(
            lambda: (
                first.poll() is not None or any(path.stat().st_size for path in part.glob("model.safetensors*.part"))
            )
        )
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    held = sum(path.stat().st_size for path in part.glob("model.safetensors*.part"))
    assert 1_000_000 < held < len(weights)
    hub.cut_after = None
    hub.requests.clear()
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 0, done.stderr
    (ranged,) = hub.ranges("model.safetensors")
    assert ranged is not None
    assert int(ranged.removeprefix("bytes=").rstrip("-")) == held
    assert not hub.ranges("tokenizer.json"), "a file that is complete is not asked for again"
    folder = tmp_path / ".hearth" / "models" / "org" / "model"
    assert (folder / "model.safetensors").read_bytes() == weights


def test_a_damaged_file_is_noticed_and_removed(tmp_path: Path, hub: Hub) -> None:
    hub.damaged = True
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 1
    assert "damaged" in done.stderr
    assert not (tmp_path / ".hearth" / "models" / "org").exists()
    hub.damaged = False
    assert pull(tmp_path, hub, "org/model").returncode == 0


def test_sharded_weights_are_those_of_the_index(tmp_path: Path, hub: Hub) -> None:
    files = hub.repositories["org/model"]
    del files["model.safetensors"]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files |= {name: name.encode() for name in names}
    files["consolidated.safetensors"] = b"the same once more"
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / ".hearth" / "models" / "org" / "model"
    assert {path.name for path in folder.glob("*.safetensors")} == set(names)
    assert not hub.ranges("consolidated.safetensors")


@pytest.mark.parametrize("named", ["../../evil.safetensors", "a/b.safetensors", "missing.safetensors", "x.bin"])
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, hub: Hub, named: str) -> None:
    files = hub.repositories["org/model"]
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": named}}).encode()
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 1
    assert "index" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.safetensors": None, "pytorch_model.bin": b"x"}, "pickle"),
        ({"model.safetensors": None}, "no safetensors"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"config.json": b'{"architectures": ["GPT2LMHeadModel"]}'}, "architecture GPT2LMHeadModel"),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, hub: Hub, change: dict[str, bytes | None], said: str
) -> None:
    for name, content in change.items():
        hub.repositories["org/model"].pop(name, None)
        if content is not None:
            hub.repositories["org/model"][name] = content
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not hub.ranges(".safetensors")
    assert not hub.ranges(".bin")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["org/none"], "no public model"),
        (["org/model", "--revision", "v9"], "no such revision"),
        (["../../etc"], "no hub id"),
        (["model"], "no hub id"),
    ],
)
def test_wrong_names_are_told_in_words(tmp_path: Path, hub: Hub, words: list[str], said: str) -> None:
    done = pull(tmp_path, hub, *words)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gated_model_says_how_to_get_it(tmp_path: Path, hub: Hub) -> None:
    hub.gated.add("org/model")
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 1
    assert "HF_TOKEN" in done.stderr


def test_the_token_is_sent_to_the_hub(tmp_path: Path, hub: Hub) -> None:
    assert pull(tmp_path, hub, "org/model", token="hf_secret").returncode == 0
    assert {token for _, token in hub.tokens} == {"Bearer hf_secret"}


def test_a_hub_that_is_away_is_told_in_words(tmp_path: Path) -> None:
    with serving() as hub:
        pass
    done = pull(tmp_path, hub, "org/model")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "again" in done.stderr


def test_an_encoder_comes_with_what_says_how_it_gives_vectors(tmp_path: Path, hub: Hub) -> None:
    folder = minilm.folder()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "sentence_bert_config.json")
    files = {name: (folder / name).read_bytes() for name in (*names, "1_Pooling/config.json")}
    hub.repositories["org/encoder"] = {**files, "model.safetensors": WEIGHTS, "onnx/model.onnx": b"no"}
    done = pull(tmp_path, hub, "org/encoder")
    assert done.returncode == 0, done.stderr
    model = open_catalogue(load_config(state_folder=tmp_path / ".hearth")).find("@hf/org/encoder")
    assert model is not None
    assert model.task is ModelTask.EMBEDDINGS
    assert model.embedding_spec is not None
    assert (model.embedding_spec.poolings[0], model.embedding_spec.normalized, model.embedding_spec.tokens_max) == (
        Pooling.MEAN,
        True,
        256,
    )
    assert not (model.folder / "onnx").exists()
