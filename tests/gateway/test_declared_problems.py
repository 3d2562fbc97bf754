"""What msgspec found wrong, in words."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.declared_problems import declared_problem
from gateway.settings.config import Config, SettingsError, load_config


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"server": {"prot": 1}}, "server.prot: there is no such field; did you mean port?"),
        ({"sever": {}}, "sever: there is no such field; did you mean server?"),
        ({"server": {"colour": 1}}, "server.colour: there is no such field"),
        ({"models": [{"folder": "x"}]}, "models[0].name: is missing [what callers say: "),
        ({"server": {"port": "80"}}, "server.port: expected a whole number, got text [port to listen on; "),
        ({"machine": {"threads": 0}}, "machine.threads: expected a whole number >= 1 [CPU threads "),
        ({"machine": {"threads": "x"}}, "machine.threads: expected a whole number, got text ["),
        ({"machine": {"device": "gpu"}}, "machine.device: it cannot be that [auto, cpu, cuda "),
        ({"server": {"unknown_fields": "x"}}, "server.unknown_fields: 'x' is none of ignore, refuse ["),
        (
            {"models": [{"name": "x", "gpus": "all"}]},
            "models[0].gpus: 'all' is none of a whole number from 1 to 64, auto",
        ),
        ({"server": {"hosts": ["A B"]}}, "server.hosts[0]: expected text matching regex"),
        ({"server": {"region_urls": {"a": 1}}}, "server.region_urls[...]: expected text, got a whole number"),
        ({"server": {"key": "k"}}, "server: `certificate` and `key` go together; one of them is missing"),
        (3, "expected a table, got a whole number"),
    ],
)
def test_the_place_comes_first_and_then_what_may_be_there(document: Any, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, Config)
    assert str(declared_problem(str(caught.value), Config)).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1\n", "hearth.toml: line 2: server.prot: there is no such field; did you mean port?"),
        (
            "[server]\ncolour = 1\n",
            "server.colour: there is no such field; `hearth doctor --settings` lists all settings",
        ),
        ("[models]\nname = 'a'\n", "models: expected a list, got a table: write [[models]], once for each"),
    ],
)
def test_settings_say_what_was_meant(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hearth.toml").write_text(text)
    with pytest.raises(SettingsError, match=re.escape(said) + "$"):
        load_config(tmp_path / "hearth.toml")
