"""`hearth models import`: which folder is made, and what is said where none can be. What the folder holds is tested in
tests/engine/gguf, and that it serves in tests/end_to_end/test_imported.py.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.commands.model_tools import import_gguf
from tests.support.gguf_files import write_model
from tests.support.small_models import reference_model


def test_a_file_becomes_a_folder_and_anything_else_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("small.gguf"), reference_model("qwen3"))
    assert main(["models", "import", "small.gguf"]) == 0
    printed = capfd.readouterr().out
    assert "Qwen3ForCausalLM: 36 tensors (36 F32), now in bfloat16" in printed
    assert "The file has no chat template" in printed
    assert "`hearth models add NAME small`" in printed
    assert main(["models", "import", "small.gguf", "--to", "again", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["target"], report["tensors"], report["types"]) == ("again", 36, {"F32": 36})
    Path("cut.gguf").write_bytes(Path("small.gguf").read_bytes()[:-1000])
    assert main(["models", "import", "cut.gguf"]) == 1
    assert "hearth: cut.gguf is cut short: " in capfd.readouterr().err
    assert sorted(os.listdir()) == ["again", "cut.gguf", "small", "small.gguf"]


def test_the_folder_is_named_like_the_file_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Sequence[str]] = []

    def run_program(module: str, arguments: Sequence[str]) -> int:
        calls.append([module, *arguments])
        return 0

    monkeypatch.setattr(import_gguf, "run_program", run_program)
    assert main(["models", "import", "below/a.b-Q4_K_M.gguf"]) == 0
    assert main(["models", "import", "a.gguf", "--to", "models/a"]) == 0
    program = "engine.gguf.convert"
    assert calls == [[program, "below/a.b-Q4_K_M.gguf", "below/a.b-Q4_K_M"], [program, "a.gguf", "models/a"]]
    assert main(["models", "import", "plain"]) == 1
    assert "which folder is to be made with --to" in capsys.readouterr().err


def test_without_its_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["models", "import", "a.gguf"]) == 1
    assert f"{sys.executable} -m pip install 'hearth-server[gguf]'" in capsys.readouterr().err
