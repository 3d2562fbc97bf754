"""The program that prints what the settings ask of a machine: as the agent takes it, and soon."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from engine.protocol.specs import MachineSpec
from gateway import machine_spec

ROOT: Final = Path(__file__).parents[2]
LATE: Final = ("cyclopts", "tqdm", "httpx", "uvicorn", "starlette", "redis", "huggingface_hub")
PRINT: Final = f"""
import tests.support.imports_spy
from {machine_spec.__name__} import main
raise SystemExit(main(["", "", ""]))
"""


def test_it_prints_the_spec_and_imports_nothing_that_it_can_do_without(tmp_path: Path) -> None:
    """An agent waits for it before each model that comes."""
    done = subprocess.run(
        [sys.executable, "-c", PRINT], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    printed, spied = done.stdout.splitlines()
    spec = msgspec.json.decode(printed, type=MachineSpec)
    assert [model.name for model in spec.models] == ["@cf/hearth/ember"]
    assert spec.source is not None
    assert str(tmp_path / "hearth.toml") in spec.source.paths
    assert set(json.loads(spied)["modules"]) & {*LATE} == set()


def test_it_says_which_fabric_the_host_declares(tmp_path: Path) -> None:
    settings = tmp_path / "hearth.toml"
    for text, fabric in (("", ""), ('[machine]\nfabric = "rack-1"\n', "rack-1")):
        settings.write_text(text)
        assert machine_spec.machine_spec(str(settings), str(tmp_path / "state"), "cpu").fabric == fabric


def test_settings_that_cannot_be_read_are_one_line_and_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hearth.toml").write_text("[machine]\nno_such_setting = 1\n")
    assert machine_spec.main(["", "", ""]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "no_such_setting" in line
    assert "line 2" in line
