"""`hearth models warm` with the engine's own process behind it."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bench.geometries import write_folder
from gateway.cli import main

CATALOGUE = """
[machine]
device = "cpu"
[[models]]
name = "@cf/hearth/ember"
serve = false
[[models]]
name = "@cf/made/up"
folder = "tiny"
random_weights = true
context_tokens = 64
kv_bytes = 1000000
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "hearth.toml").write_text(CATALOGUE)
    return write_folder("tiny", tmp_path / "tiny")


def warm(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["models", "warm", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_model_is_prepared_once_and_found_from_then_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "warm", "@cf/made/up"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("@cf/made/up: prepared, ")
    assert str(folder / ".hearth") in said
    status, (checked,) = warm(capsys, "--all", "--check")
    assert (status, checked["found"], checked["problem"]) == (0, True, "")


def test_a_model_that_cannot_be_opened_says_why_and_the_others_are_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Path("hearth.toml")
    settings.write_text(settings.read_text() + '[[models]]\nname = "@cf/no/model"\nfolder = "nothing"\n')
    status, told = warm(capsys, "--all", "--check")
    assert status == 1
    problems = {document["name"]: document["problem"] for document in told}
    assert "prepares it" in problems["@cf/made/up"]
    assert "nothing" in problems["@cf/no/model"]
    assert "Traceback" not in problems["@cf/no/model"]


def test_a_model_of_several_ranks_is_opened_on_all_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Path("hearth.toml")
    settings.write_text(settings.read_text() + "gpus = 2\n")
    status, (told,) = warm(capsys, "@cf/made/up")
    assert (status, told["problem"]) == (0, "")
    settings.write_text(settings.read_text().replace("gpus = 2", "gpus = 3"))
    status, (told,) = warm(capsys, "@cf/made/up")
    assert status == 1
    assert "3 ranks" in told["problem"]


@pytest.mark.parametrize("words", [[], ["@cf/made/up", "--all"], ["@cf/no/such"]])
def test_what_to_warm_must_be_said(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["models", "warm", *words]) == 1
    assert "hearth: " in capsys.readouterr().err


def test_it_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "warm", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--check" in said
    assert "MODEL/.hearth" in said
