"""Manifests: what a host takes of a model that others name, and what it refuses."""

import hashlib
import json
from pathlib import Path

import pytest
from msgspec import structs

from gateway.catalogue import manifest
from gateway.catalogue.manifest import ManifestError, manifest_digest, read_manifest, require_manifest, text_files
from tenants.records.catalogue import CatalogueFile, CatalogueModel
from tests.support.tiny_model import write_tiny

CONFIG = CatalogueFile("config.json", 2, "ab" * 32)


def model(*files: CatalogueFile) -> CatalogueModel:
    return CatalogueModel("notes", {}, [CONFIG, *files])


def test_a_folder_is_what_its_model_needs_and_nothing_else(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "notes")
    for name in ("pickle.bin", "modeling.py", "README.md", ".hidden.json"):
        (folder / name).write_text("x")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    counted: list[int] = []
    files = read_manifest(folder, lambda count: counted.append(count) is None)
    names = {file.name for file in files}
    assert names == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "1_Pooling/config.json")
    }
    for file in files:
        assert file.sha256 == hashlib.sha256((folder / file.name).read_bytes()).hexdigest()
    assert sum(counted) == sum(file.bytes for file in files) == manifest.manifest_bytes(folder)
    assert "model.safetensors" not in {file.name for file in text_files(files)}
    require_manifest(CatalogueModel("notes", {}, files))


def test_weights_are_those_that_the_index_names(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "notes")
    (folder / "consolidated.safetensors").write_bytes(b"twice")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    names = {file.name for file in read_manifest(folder, lambda _: True)}
    assert {name for name in names if "safetensors" in name} == {"model.safetensors", index.name}
    index.write_text("[]")
    with pytest.raises(ManifestError, match=r"index\.json cannot be read"):
        read_manifest(folder, lambda _: True)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../config.json",
            "/etc/passwd.json",
            "a/../config.json",
            "a/b/config.json",
            "a/tokenizer.json",
            "a//config.json",
        ),
        *("..json", ".config.json", "model.bin", "model.pkl", "modeling.py", "config.json\n", "config.json/x.json"),
        *("", "a\0.json", "SHA256SUMS", "C:\\x.json", "-rf.json", f"{'x' * 200}.json", "./config.json"),
        *("a//config.json", "ä.json"),
    ],
)
def test_a_name_that_is_no_file_of_a_model_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="is no file of a model"):
        require_manifest(model(CatalogueFile(name, 1, "cd" * 32)))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (CatalogueFile("Config.JSON".lower(), 2, "cd" * 32), "twice"),
        (CatalogueFile("a.json", 2, "AB" * 32), "no SHA-256"),
        (CatalogueFile("a.json", 2, "ab"), "no SHA-256"),
        (CatalogueFile("a.json", 2, "../" + "a" * 61), "no SHA-256"),
        (CatalogueFile("a.json", -1, "cd" * 32), "may have"),
        (CatalogueFile("a.json", manifest.TEXT_BYTES_MAX + 1, "cd" * 32), f"may have {manifest.TEXT_BYTES_MAX}"),
        (CatalogueFile("a.safetensors", manifest.MODEL_BYTES_MAX, "cd" * 32), "bytes together"),
    ],
)
def test_hostile_files_are_refused_in_words(file: CatalogueFile, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        require_manifest(model(file))


def test_too_many_files_and_a_model_without_config_are_refused() -> None:
    many = [CatalogueFile(f"{number}.json", 1, "cd" * 32) for number in range(manifest.FILES_MAX)]
    with pytest.raises(ManifestError, match=f"{manifest.FILES_MAX} at the most"):
        require_manifest(model(*many))
    require_manifest(model(*many[1:]))
    with pytest.raises(ManifestError, match=r"no config\.json"):
        require_manifest(CatalogueModel("notes", {}, many[:1]))


def test_a_digest_names_files_by_names_and_sums() -> None:
    files = [CONFIG, CatalogueFile("a.json", 1, "cd" * 32)]
    assert manifest_digest(files) == manifest_digest(files[::-1])
    for other in (structs.replace(files[1], name="b.json"), structs.replace(files[1], sha256="ef" * 32)):
        assert manifest_digest([CONFIG, other]) != manifest_digest(files)
