"""A compressed model from end to end: made, added and served by the commands that an operator types."""

import filecmp
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import engine.builtin_model
from engine.compression.expand import expand_folder
from tests.end_to_end.conftest import EMBER, Hearth, run_hearth, serving
from tests.support.waiting import wait_for

WEIGHTS = Path(engine.builtin_model.__file__).parent
PACKED = "@cf/acme/packed"
PROMPTS = ("What is Hearth?", "The capital of France is", "1, 2, 3,")


def test_a_compressed_model_answers_token_for_token_as_its_original(tmp_path: Path) -> None:
    said = run_hearth(tmp_path, "models", "compress", EMBER, "packed", "--distribution")
    assert "escapes" in said
    assert "`hearth models add NAME packed`" in said
    assert "whole" in run_hearth(tmp_path, "models", "add", PACKED, "packed", "--dtype", "float32")
    settings = f'[[models]]\nname = "{EMBER}"\ndtype = "float32"\n'  # or each start measures which is fastest
    with serving(tmp_path, settings) as hearth:
        told = {model: [completed(hearth, model, prompt) for prompt in PROMPTS] for model in (EMBER, PACKED)}
    assert all(told[EMBER])
    assert told[PACKED] == told[EMBER]
    expand_folder(tmp_path / "packed", tmp_path / "back", torch.device("cpu"))
    names = [path.name for path in WEIGHTS.iterdir() if path.is_file()]
    assert filecmp.cmpfiles(WEIGHTS, tmp_path / "back", names, shallow=False) == (names, [], [])


def completed(hearth: Hearth, model: str, prompt: str) -> str:
    path = f"/client/v4/accounts/{hearth.account_id}/ai/run/{model}"
    with hearth.client() as client:
        answer = client.post(path, json={"prompt": prompt, "temperature": 0, "max_tokens": 24}).raise_for_status()
    return str(answer.json()["result"]["response"])


@pytest.mark.parametrize("early", [True, False])
def test_a_command_that_is_stopped_leaves_nothing(tmp_path: Path, early: bool) -> None:
    """`early`: as a terminal's Ctrl-C stops it, all of its processes, of which one still imports."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).symlink_to(WEIGHTS / name)
    with (folder / "large").open("wb") as large:  # a sparse one, to be copied for a while
        large.truncate(4 << 30)
    command = [sys.executable, "-m", "gateway.cli", "models", "compress", "model", "made", "--device", "cpu"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=0
    )
    if early:
        wait_for(psutil.Process(process.pid).children, 60, "the engine's process")
        os.killpg(process.pid, signal.SIGINT)
    else:
        wait_for(lambda: list(tmp_path.glob("made.*")), 60, "it began")
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "hearth: stopped"
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == ["model"]
