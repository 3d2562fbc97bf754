"""System prompts that an operator publishes, as a model's conversations begin with them."""

from pathlib import Path

import pytest

from gateway.catalogue.catalogue import BUILT_IN, folder_of, model_entries, spec_of
from gateway.settings.config import SettingsError, load_config
from gateway.text.tokenizer import ModelTokenizer

SYSTEM = "You are the assistant of a library.  Answer in one sentence, and name the shelf.\n" * 8


def told(folder: Path, *prompts: str, names: tuple[str, ...] = ("prompt.txt",)) -> list[list[int]]:
    """What a machine is told of these files of the built-in model."""
    for name, prompt in zip(names, prompts, strict=False):
        (folder / name).write_text(prompt)
    listed = ", ".join(f'"{name}"' for name in names)
    (folder / "hearth.toml").write_text(f'[[models]]\nname = "{BUILT_IN}"\npublic_prefixes = [{listed}]\n')
    config = load_config(folder / "hearth.toml")
    return spec_of(config, model_entries(config)[0]).public_prefixes


def test_every_conversation_that_opens_with_the_prompt_begins_with_the_prefix(tmp_path: Path) -> None:
    (prefix,) = told(tmp_path, SYSTEM)
    config = load_config(tmp_path / "hearth.toml")
    text = ModelTokenizer(folder_of(config, model_entries(config)[0]))
    for said in ("Where is Moby-Dick?", "a", "ß", "", " ", "<|end|>", "\n\nalpha", "日本"):
        ids = text.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}])
        assert ids[: len(prefix)] == prefix, said
        if said.strip():
            assert len(ids) > len(prefix)
    other = text.encode_chat([{"role": "system", "content": SYSTEM[:-20]}, {"role": "user", "content": "a"}])
    assert other[: len(prefix)] != prefix
    assert len(prefix) > len(text.encode_prompt(SYSTEM.strip())) - 2, "the whole prompt is in it"


def test_files_that_cannot_be_published_are_named(tmp_path: Path) -> None:
    for prompt, problem in (("", "it is empty"), (" \n", "it is empty"), ("x" * (1 << 20) + "y", "1,048,576 bytes")):
        with pytest.raises(SettingsError, match=problem) as refused:
            told(tmp_path, prompt)
        assert "prompt.txt" in str(refused.value)
    with pytest.raises(SettingsError, match=r"missing\.txt"):
        told(tmp_path, names=("missing.txt",))
    (tmp_path / "prompt.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"prompt\.txt"):
        told(tmp_path)


def test_without_files_nothing_is_published(tmp_path: Path) -> None:
    assert told(tmp_path, names=()) == []
