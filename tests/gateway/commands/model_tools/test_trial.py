"""gateway/commands/model_tools/trial.py: one prompt through a real replica before a folder is added."""

import json
import re
import socket
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.hostinfo.memory import device_budgets
from engine.protocol import frames
from engine.protocol.frames import SequenceFinished
from engine.protocol.types import FinishReason, RejectReason
from gateway.cli import main
from gateway.commands.model_tools.folder_check import UnservableFolder, inspect_folder
from gateway.commands.model_tools.trial import _ask
from gateway.settings.config import Config, ModelEntryConfig, load_config
from tests.support import minilm
from tests.support.model_folders import EMBER
from tests.support.tiny_model import write_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_tiny(tmp_path / "notes")


def test_a_folder_answers_a_prompt_before_it_is_added(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "notes", "notes"]) == 0
    assert "it answered a prompt" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_a_terminal_shows_how_far_the_first_prompt_is_and_a_file_has_none_of_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["models", "add", "notes", "notes"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["models", "add", "again", "notes"]) == 0
    shown = capsys.readouterr().err
    assert 0 <= shown.find("opening again") < shown.find("again answers its first prompt")


def test_weights_that_give_no_numbers_are_found_by_the_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, folder / "model.safetensors")
    assert main(["models", "add", "notes", "notes"]) == 1
    assert "the file is damaged" in capsys.readouterr().err
    assert not list(load_config().added_folder.glob("**/*.toml"))
    assert main(["models", "add", "notes", "notes", "--untried"]) == 0
    assert "not tried" in capsys.readouterr().out


def test_a_model_of_vectors_gives_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["models", "add", "mini", str(minilm.folder())]) == 0


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (
            frames.Reject(1, RejectReason.INVALID, "token 5000 is none of 4096"),
            "refuses a prompt of 2 tokens: token 5000",
        ),
        (
            frames.StepOutputs([1], [0], b"", finished=[SequenceFinished(1, FinishReason.ERROR, 0, "no numbers")]),
            "answers a prompt with an error: no numbers",
        ),
        (
            frames.StepOutputs(
                [1], [1], array("I", [1 << 20]).tobytes(), finished=[SequenceFinished(1, FinishReason.LENGTH, 1)]
            ),
            "answers with tokens that tokenizer.json lacks: [1048576]",
        ),
        (None, "ended over its first prompt"),
    ],
)
def test_what_is_no_answer_is_refused_by_name(folder: Path, frame: frames.Frame | None, said: str) -> None:
    entry = ModelEntryConfig(name="notes", folder=str(folder))
    report = inspect_folder(Config(), entry, device_budgets(None, []))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if frame is not None:
            theirs.sendall(frames.encode_frame(frame))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(UnservableFolder, match=re.escape(said)):
            _ask(ours, [1, 2], report, entry)


def test_a_tokenizer_whose_control_tokens_are_not_the_models_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    plain = json.loads((EMBER / "tokenizer.json").read_text())["model"]["vocab"]["e"]
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({**config, "eos_token_id": [plain]}))
        assert main(["models", "add", "notes", "notes"]) == 1
        said = capsys.readouterr().err
        assert f"answers end with token {plain}, which is no control token" in said
        assert "tokenizer.json is another model's" in said
        (folder / name).write_text(json.dumps(config))
