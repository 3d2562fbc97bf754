from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stamp_engine import Stamps


def test_equal_folders_of_equal_weights_have_one_digest_wherever_they_are(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
        (tmp_path / name / "README.md").write_text(name)
    assert Stamps(8, 4).loaded().digest(tmp_path / "a") == Stamps(8, 4).loaded().digest(tmp_path / "b")


@pytest.mark.parametrize("changed", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_another_tokenizer_or_template_is_another_model(tmp_path: Path, changed: str) -> None:
    model = Stamps(8, 4).loaded()
    before = model.digest(tmp_path)
    (tmp_path / changed).write_text("other")
    assert model.digest(tmp_path) != before


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    model = Stamps(8, 4).loaded()
    assert replace(model, revision="other").digest(tmp_path) != model.digest(tmp_path)
