import json
import shutil
from pathlib import Path

import pytest

from gateway.catalogue.catalogue import BUILT_IN, folder_of, model_entries, open_catalogue, pulled_folder, spec_of
from gateway.settings.config import Config, ModelEntryConfig, SettingsError, load_config

EMBER = folder_of(Config(), ModelEntryConfig(name=BUILT_IN))


def _config(folder: Path, text: str = "") -> Config:
    (folder / "hearth.toml").write_text(text)
    return load_config(folder / "hearth.toml")


def _pull(config: Config, name: str) -> Path:
    folder = pulled_folder(config, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(EMBER, folder)
    return folder


def test_the_built_in_model_is_there_without_settings(tmp_path: Path) -> None:
    model = open_catalogue(_config(tmp_path)).find(BUILT_IN)
    assert model is not None
    assert model.context_tokens == 8192
    assert model.function_calling
    assert model.tokenizer.stop_ids
    assert model.price.output > model.price.input > model.price.cached_input > 0


def test_pulled_models_are_found_and_half_pulled_ones_are_not(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _pull(config, "@hf/Org/Model-1")
    (config.models_folder / ".partial" / "Org--Other").mkdir(parents=True)
    shutil.copy(EMBER / "config.json", config.models_folder / ".partial" / "Org--Other")
    catalogue = open_catalogue(config)
    assert [model.name for model in catalogue] == [BUILT_IN, "@hf/Org/Model-1"]
    found = catalogue.find("@hf/Org/Model-1")
    assert found is not None
    assert found.id == open_catalogue(config).find("@hf/Org/Model-1").id  # type: ignore[union-attr]
    assert found.id != catalogue.find(BUILT_IN).id  # type: ignore[union-attr]


def test_settings_change_known_models_and_add_others(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        f"""
        [[models]]
        name = "{BUILT_IN}"
        replicas = 2
        context_tokens = 1024
        [models.price]
        input = 10.0
        output = 20.0
        [[models]]
        name = "@cf/mine/model"
        folder = "{EMBER}"
        """,
    )
    built_in, mine = open_catalogue(config)
    assert (built_in.spec.replicas, built_in.context_tokens) == (2, 1024)
    assert (built_in.price.input, built_in.price.cached_input, built_in.price.output) == (10.0, 2.0, 20.0)
    assert (mine.name, mine.folder) == ("@cf/mine/model", EMBER)


def test_a_model_can_be_left_out(tmp_path: Path) -> None:
    config = _config(tmp_path, f'[[models]]\nname = "{BUILT_IN}"\nserve = false')
    assert model_entries(config) == []
    assert list(open_catalogue(config)) == []


def test_a_broken_folder_leaves_out_its_model_alone_and_says_why(tmp_path: Path) -> None:
    config = _config(tmp_path, '[[models]]\nname = "@cf/mine/gone"\nfolder = "nowhere"')
    pulled = _pull(config, "@hf/org/broken")
    (pulled / "tokenizer.json").unlink()
    catalogue = open_catalogue(config)
    assert [model.name for model in catalogue] == [BUILT_IN]
    assert "no config.json" in catalogue.problems["@cf/mine/gone"]
    assert "no tokenizer.json" in catalogue.problems["@hf/org/broken"]


def test_a_price_that_punishes_the_cache_is_refused(tmp_path: Path) -> None:
    price = "[models.price]\ninput = 1.0\ncached_input = 2.0"
    with pytest.raises(SettingsError, match="price"):
        open_catalogue(_config(tmp_path, f'[[models]]\nname = "{BUILT_IN}"\n{price}'))


def test_what_a_machine_is_told_is_what_the_settings_say(tmp_path: Path) -> None:
    text = f'[[models]]\nname = "{BUILT_IN}"\nkv_bytes = 1000000\nblock_tokens = 32\nsequences = 5\ndtype = "float32"'
    text += "\nscope_floor_blocks = 3\nscope_cap_blocks = 7"
    config = _config(tmp_path, text)
    spec = spec_of(config, model_entries(config)[0])
    assert (spec.kv_bytes, spec.block_tokens, spec.sequences, spec.dtype) == (1000000, 32, 5, "float32")
    assert (spec.scope_floor_blocks, spec.scope_cap_blocks) == (3, 7)
    assert json.loads((Path(spec.folder) / "config.json").read_text())["model_type"] == "llama"


def test_models_of_one_folder_share_its_tokenizer(tmp_path: Path) -> None:
    entry = '[[models]]\nname = "@cf/mine/{0}"\nfolder = "{1}"\n'
    mine = _pull(_config(tmp_path), "@hf/Org/Model-1")
    catalogue = open_catalogue(_config(tmp_path, entry.format("a", EMBER) + entry.format("b", mine)))
    tokenizers = {model.name: model.tokenizer for model in catalogue}
    assert tokenizers["@cf/mine/a"] is tokenizers[BUILT_IN]
    assert tokenizers["@cf/mine/b"] is tokenizers["@hf/Org/Model-1"] is not tokenizers[BUILT_IN]
