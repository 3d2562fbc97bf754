"""gateway/settings/lines.py: the line that an error about a TOML file means, as gateway/settings/config.py says it."""

import re
from pathlib import Path

import pytest

from gateway.settings.config import SettingsError, load_config, load_readable
from gateway.settings.lines import line_of_error, readable_part

FILE = """\
state_folder = "there"
[server]
port = 1

[[models]]
name = "a"
replicas = 0

[[models]]   # the second
name = "b"
price = { input = 1.0 }
colour = "red"
[models.price.x]
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("Expected `int`, got `str` - at `$.server.port`", 3),
        ("Expected `int` >= 1 - at `$.models[0].replicas`", 7),
        ("Object contains unknown field `colour` - at `$.models[1]`", 12),
        ("Expected `float` >= 0.0 - at `$.models[1].price.input`", 11),
        ("Object missing required field `name` - at `$.models[1]`", 9),
        ("Object contains unknown field `x` - at `$.models[1].price`", 13),
        ("Object contains unknown field `state_folder`", 1),
        ("Object contains unknown field `nowhere`", None),
        ("something else", None),
    ],
)
def test_an_error_has_the_line_of_its_value_or_of_its_table(error: str, line: int | None) -> None:
    assert line_of_error(FILE, error) == line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[[models]]\nname = 'a'\n\nreplicas = 0\n",
            "hearth.toml: line 4: models[0].replicas: expected a whole number >= 1",
        ),
        (
            "[[models]]\nname = 'a'\n[[models]]\nname = 'b'\naliases = ['a']\n",
            "line 5: the model a is there",
        ),
        ("[server]\nport =\n", "at line 2"),
    ],
)
def test_settings_that_are_refused_say_their_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hearth.toml").write_text(text)
    with pytest.raises(SettingsError, match=re.escape(said)):
        load_config(tmp_path / "hearth.toml")


def test_what_is_before_the_wrong_table_is_read_all_the_same(tmp_path: Path) -> None:
    assert readable_part("x = 1\n[server]\nport = 2\n[[models]]\nname = \n") == "x = 1\n[server]\nport = 2"
    assert readable_part("x = \n") == readable_part("x = 1") == ""
    path = tmp_path / "hearth.toml"
    for text in (FILE, "state_folder = 'there'\n[server]\nport = 1\n[[models]\nname = 'a'"):
        path.write_text(text)
        config = load_readable(str(path), None)
        assert (config.state, config.server.port, config.models) == (tmp_path / "there", 1, [])
    path.write_text("colour = 1")
    assert load_readable(str(path), str(tmp_path / "state")).state == tmp_path / "state"
