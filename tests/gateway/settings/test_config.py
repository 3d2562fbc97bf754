import os
import re
from pathlib import Path

import pytest

from gateway.settings.config import SOCKET_PATH_BYTES_MAX, Config, SettingsError, load_config, load_readable
from gateway.settings.reference import describe, settings

ISSUER = """
[[issuers]]
name = 'acme'
issuer = 'https://acme.example'
audience = 'hearth'
algorithm = 'ES256'
jwks_url = 'https://acme.example/jwks'
"""


ROOT = Path(__file__).parents[3]


def _write(folder: Path, text: str) -> Path:
    path = folder / "hearth.toml"
    path.write_text(text)
    return path


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, ""))
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8787)
    assert config.state == tmp_path / ".hearth"
    assert config.store_url == f"sqlite:{tmp_path / '.hearth' / 'hearth.db'}"


def test_options_lie_over_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "[server]\nport = 1\nheader_s = 3.0")
    config = load_config(path, port=2, state_folder=tmp_path / "s", device="cpu")
    assert (config.server.port, config.server.header_s, config.machine.device) == (2, 3.0, "cpu")
    assert config.state == tmp_path / "s"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour = 1", "colour"),
        ("[server]\nprot = 1", "prot"),
        ("[server]\nport = 70000", "port"),
        ("[server]\nport = '80'", "port"),
        ("[[models]]\nname = '-llama'", "name"),
        ("[[models]]\nname = '@cf/a/../b'", "name"),
        ("[[models]]\nname = '@cf/a/b'\n[[models]]\nname = '@cf/a/b'", "@cf/a/b"),
        ("[machine]\ndevice = 'tpu'", "device"),
        ("[machine]\nfabric = 'rack 1'", "fabric"),
        ("[machine]\nfabric = '-rack'", "fabric"),
        ("[machine]\nfabrics = 'rack-1'", "fabrics"),
        ("[server", "TOML"),
        (ISSUER.replace("ES256", "none"), "algorithm"),
        (ISSUER.replace("https://acme.example/jwks", "http://acme.example/"), "https"),
        (ISSUER + ISSUER, "acme"),
        (ISSUER + ISSUER.replace("'acme'", "'other'"), r"https://acme\.example"),
    ],
)
def test_a_wrong_file_is_refused_and_the_message_says_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_config(_write(tmp_path, text))


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"other\.toml"):
        load_config(tmp_path / "other.toml")


def test_no_file_at_all_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config() == load_config(_write(tmp_path, ""))


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Config().server.port = 1  # type: ignore[misc]


def test_model_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, "[[models]]\nname = '@cf/a/b'\nfolder = 'here'"))
    assert config.models[0].folder == str(tmp_path / "here")


def test_issuers_files_are_relative_to_the_file_and_urls_are_not(tmp_path: Path) -> None:
    (issuer,) = load_config(_write(tmp_path, ISSUER + "ca_file = 'ca.pem'")).issuers
    assert (issuer.jwks_url, issuer.ca_file) == ("https://acme.example/jwks", str(tmp_path / "ca.pem"))
    keys = ISSUER.replace("jwks_url = 'https://acme.example/jwks'", "jwks_file = 'keys.json'")
    assert load_config(_write(tmp_path, keys)).issuers[0].jwks_file == str(tmp_path / "keys.json")


def test_sockets_move_to_a_short_folder_where_the_state_folder_is_too_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    config = load_config(_write(tmp_path, ""), state_folder=deep)
    assert config.run_folder != deep / "run"
    assert config.run_folder == load_config(_write(tmp_path, ""), state_folder=deep).run_folder
    assert config.run_folder != load_config(_write(tmp_path, ""), state_folder=deep / "x").run_folder
    assert len(os.fsencode(config.machine_address.removeprefix("unix:"))) <= SOCKET_PATH_BYTES_MAX


def test_every_setting_has_a_line_of_documentation_and_shows_in_describe() -> None:
    described = describe()
    for key, _, description in settings():
        assert description, f"{key} has no description"
        assert f"  {key} " in described
        for path in re.findall(r"\b(?:gateway|engine|tenants)/[\w/.]*\w", description):
            assert (ROOT / path).exists(), f"{key} names {path}, which does not exist"


def test_a_cap_below_the_floor_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "hearth.toml"
    path.write_text('[[models]]\nname = "@cf/a/b"\nscope_floor_blocks = 9\nscope_cap_blocks = 8\n')
    with pytest.raises(SettingsError, match="scope_cap_blocks of @cf/a/b"):
        load_config(path)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_the_settings_that_the_pages_show_can_be_read(page: str, tmp_path: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        load_config(_write(tmp_path, block))


def test_the_pages_show_settings() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for section in ("[[issuers]]", "[[models]]", "[machine]", "[store]"):
        assert section in pages


def test_a_file_that_may_not_be_read_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, "[server]\nport = 1\n")

    def refuse(self: Path, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(SettingsError, match=r"hearth\.toml cannot be read: Permission denied"):
        load_config(path)
    assert load_readable(str(path), None).server.port == 8787
