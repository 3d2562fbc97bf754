"""gateway/catalogue/names.py: what a name finds, and what somebody may have meant who wrote one that finds nothing."""

import pytest

from gateway.catalogue.names import ModelNames

EMBER, QWEN, NOTES = "@cf/hearth/ember", "@hf/Qwen/Qwen3-0.6B", "notes"
NAMES = ModelNames({EMBER: ["gpt-4o-mini"], QWEN: [], NOTES: []})


def _everything(name: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (EMBER, EMBER),
        ("ember", EMBER),
        ("hearth/ember", EMBER),
        ("gpt-4o-mini", EMBER),
        ("Qwen/Qwen3-0.6B", QWEN),
        ("Qwen3-0.6B", QWEN),
        (NOTES, NOTES),
        ("mber", None),
        ("earth/ember", None),
        ("@cf/hearth", None),
        ("Ember", None),
        ("", None),
    ],
)
def test_a_name_finds_its_model_by_the_whole_an_alias_or_its_end(name: str, found: str | None) -> None:
    assert NAMES.find(name) == found


def test_an_end_that_two_names_have_finds_neither_and_both_are_suggested() -> None:
    names = ModelNames({EMBER: [], "@cf/acme/ember": []})
    assert names.find("ember") is None
    assert names.find("acme/ember") == "@cf/acme/ember"
    assert names.suggest("ember", _everything) == [EMBER, "@cf/acme/ember"]


def test_a_whole_name_and_an_alias_go_before_another_models_end() -> None:
    names = ModelNames({EMBER: [], "ember": [], "@cf/acme/notes": [], "@cf/acme/log": ["notes"]})
    assert names.find("ember") == "ember"
    assert names.find("notes") == "@cf/acme/log"


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("embr", EMBER),
        ("Ember", EMBER),
        ("@cf/heart/ember", EMBER),
        ("gpt-4o-mini-2024", "gpt-4o-mini"),
        ("qwen/qwen3-0.6b", QWEN),
        ("Qwen3", QWEN),
        ("note", NOTES),
    ],
)
def test_what_is_alike_is_suggested_first(name: str, suggested: str) -> None:
    assert NAMES.suggest(name, _everything)[:1] == [suggested]


def test_nothing_is_suggested_that_is_not_alike_or_not_permitted() -> None:
    assert NAMES.suggest("claude-opus", _everything) == []
    assert NAMES.suggest("embr", lambda name: name == QWEN) == []
    assert ModelNames({EMBER: [], "@cf/acme/ember": []}).suggest("ember", lambda name: name == EMBER) == [EMBER]


def test_a_name_of_any_length_is_compared_in_no_time() -> None:
    names = ModelNames({f"@cf/org{i}/model-{i}": [f"alias-{i}"] for i in range(256)})
    assert names.suggest("x" * 100_000, _everything) == []
