"""gateway/catalogue/follower.py: a gateway whose catalogue follows its settings while calls run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.catalogue import follower
from gateway.catalogue.catalogue import BUILT_IN, Catalogue
from gateway.catalogue.follower import CatalogueFollower
from gateway.catalogue.registrations import registration_of, save_registration
from gateway.catalogue.report import catalogue_reports
from gateway.settings.config import SettingsFile, load_config
from gateway.state_dir import open_state
from tests.support.served_gateway import looped
from tests.support.tiny_model import write_tiny
from tests.support.waiting import holds, until

GOOD = '[[models]]\nname = "notes"\nfolder = "notes"\nprice = { output = 5.0 }\n'


@asynccontextmanager
async def following(folder: Path, text: str = GOOD) -> AsyncIterator[Catalogue]:
    """A catalogue that follows folder/hearth.toml, of a tiny model and the built-in one."""
    path = folder / "hearth.toml"
    write_tiny(folder / "notes")
    path.write_text(text)
    config = load_config(path)
    open_state(config)
    followed = CatalogueFollower(config, SettingsFile(str(path), lambda: load_config(path)))
    running = asyncio.create_task(followed.run())
    try:
        await until(lambda: list(catalogue_reports(config)))
        yield followed.catalogue
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert not list(catalogue_reports(config)), "its report goes with it"


@looped
async def test_an_edit_changes_the_catalogue_as_a_whole_and_a_found_model_stays_what_it_was(tmp_path: Path) -> None:
    async with following(tmp_path) as catalogue:
        before, ember = catalogue.get("notes"), catalogue.get(BUILT_IN)
        (tmp_path / "hearth.toml").write_text(GOOD.replace("5.0", "7.0") + 'aliases = ["other"]\n')
        await until(lambda: catalogue.find("other") is not None)
        after = catalogue.get("notes")
        assert (before.price.output, after.price.output) == (5.0, 7.0)
        assert after.tokenizer is before.tokenizer, "nothing of its folder was read again"
        assert catalogue.get(BUILT_IN) is ember
        (tmp_path / "hearth.toml").unlink()
        (tmp_path / "hearth.toml").write_text("")
        await until(lambda: catalogue.names == [BUILT_IN])
        assert catalogue.find("other") is None


@looped
async def test_what_is_wrong_changes_nothing_and_is_reported_until_it_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(tmp_path) as catalogue:
        config, before = load_config(tmp_path / "hearth.toml"), list(catalogue)
        for text, said in (
            (GOOD + "replicas = 0\n", "line 5: models[0].replicas: expected a whole number >= 1"),
            (GOOD + "colour = 1\n", "line 5: models[0].colour: there is no such field"),
            (GOOD + "x = \n", "at line 5"),
            (GOOD + f'aliases = ["{BUILT_IN}"]\n', f"the alias {BUILT_IN} of notes is a name of {BUILT_IN}"),
            (GOOD.replace("5.0", "5.0, input = 1.0, cached_input = 2.0"), "models.price of notes"),
        ):
            (tmp_path / "hearth.toml").write_text(text)
            await until(lambda: said in next(catalogue_reports(config)).problem)  # noqa: B023
            assert list(catalogue) == before
        assert [record.message for record in caplog.records].count("settings_refused") == 5
        (tmp_path / "hearth.toml").write_text(GOOD)
        await until(lambda: next(catalogue_reports(config)).problem == "")


@looped
async def test_what_commands_register_and_what_is_pulled_is_followed_and_other_tables_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(tmp_path) as catalogue:
        config = load_config(tmp_path / "hearth.toml")
        added = registration_of(config, "acme/second")
        added.settings["folder"] = str(tmp_path / "notes")
        save_registration(added)
        await until(lambda: "acme/second" in catalogue.names)
        (config.models_folder / "org").mkdir()
        write_tiny(config.models_folder / "org" / "pulled")
        await until(lambda: catalogue.find("org/pulled") is not None)
        (config.models_folder / "org" / "pulled" / "tokenizer.json").unlink()
        await until(lambda: "no tokenizer.json" in catalogue.problems.get("@hf/org/pulled", ""))
        (tmp_path / "hearth.toml").write_text(GOOD + "[server]\nport = 1\n")
        await until(lambda: "settings_wait_for_a_restart" in [record.message for record in caplog.records])
        assert json.loads(json.dumps(next(catalogue_reports(config)).problems)).keys() == {"@hf/org/pulled"}


@looped
async def test_a_file_is_not_read_while_it_is_still_written(tmp_path: Path) -> None:
    async with following(tmp_path) as catalogue:
        path, parts = tmp_path / "hearth.toml", GOOD.replace('notes"', 'later"', 1).splitlines(keepends=True)
        seen = set(catalogue.names)

        def write_more() -> bool:
            path.write_text("".join(parts[: 1 + len(seen)]))
            return "notes" in catalogue.names

        await holds(write_more, 1.0)
        path.write_text("".join(parts))
        await until(lambda: "later" in catalogue.names)
        assert "notes" not in catalogue.names


@looped
async def test_a_bug_in_reading_them_ends_nothing_but_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(tmp_path) as catalogue:
        config = load_config(tmp_path / "hearth.toml")
        with monkeypatch.context() as broken:
            broken.setattr(follower, "open_catalogue", lambda *_: 1 / 0)
            (tmp_path / "hearth.toml").write_text(GOOD + "replicas = 2\n")
            await until(lambda: "ZeroDivisionError" in next(catalogue_reports(config)).problem)
        (tmp_path / "hearth.toml").write_text(GOOD + "replicas = 3\n")
        await until(lambda: catalogue.get("notes").spec.replicas == 3)
