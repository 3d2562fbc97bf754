"""`hearth models` on the hosts of a cluster: what is said on one host is in the store for all of them."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import structs

from gateway.catalogue.catalogue import model_entries
from gateway.catalogue.mirror import read_mirror
from gateway.cli import main
from gateway.commands.checks.cluster_models import cluster_models
from gateway.commands.checks.finding import FindingLevel
from gateway.commands.model_tools import add, folder_check
from gateway.identity.host_identity import HostRole
from gateway.settings.config import Config, load_config
from tenants.open import open_store
from tenants.records.catalogue import CatalogueModel, ClusterCatalogue, HostCatalogue, ModelProgress
from tenants.store.protocol import ClusterStore
from tests.support.hosts import host_maker
from tests.support.tiny_model import write_tiny

NAME = "@cf/acme/notes"
BUILT_IN = "@cf/hearth/ember"
T = TypeVar("T")


def ask(question: Callable[[ClusterStore], Awaitable[T]]) -> T:
    async def asked() -> T:
        store = open_store(load_config().store_url)
        try:
            return await question(store.cluster)
        finally:
            await store.close()

    return asyncio.run(asked())


def stored() -> ClusterCatalogue:
    catalogue = ask(lambda store: store.catalogue())
    assert catalogue is not None
    return catalogue


def put(*models: CatalogueModel) -> None:
    """Another host changes the catalogue."""
    before = stored()
    assert ask(
        lambda store: store.put_catalogue(ClusterCatalogue(f"{before.number + 1}-x", list(models)), before.revision)
    )


def served() -> list[str]:
    return [entry.name for entry in model_entries(load_config())]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model's, below the folder of a gateway's host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(add, "try_prompt", lambda *_: None)
    monkeypatch.setattr(folder_check, "_inspected", lambda *_: None)  # test_add.py has the engine look
    return write_tiny(tmp_path / "notes")


@pytest.fixture
def gateway(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["cluster", "init", "--name", "gw1"]) == 0
    capsys.readouterr()
    return folder


def test_a_model_is_in_the_store_with_the_sums_of_its_files_and_read_where_it_is(
    gateway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "add", NAME, str(gateway), "--alias", "n", "--machines", "2"]) == 0
    (model,) = stored().models
    assert (model.name, model.settings, model.hub) == (NAME, {"aliases": ["n"], "machines": "2"}, "")
    for file in model.files:
        assert file.sha256 == hashlib.sha256((gateway / file.name).read_bytes()).hexdigest()
    entry = model_entries(load_config())[-1]
    assert (entry.name, entry.aliases, entry.machines) == (NAME, ["n"], 2)
    assert Path(entry.folder or "").resolve() == gateway
    assert not list(Path(".hearth").glob("added/**/*.toml"))
    assert main(["models", "add", NAME, str(gateway)]) == 1
    assert "the catalogue has @cf/acme/notes already" in capsys.readouterr().err


def test_settings_and_removal_are_for_all_hosts_and_so_is_the_built_in_model(
    gateway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "add", NAME, str(gateway)]) == 0
    files = stored().models[0].files
    assert main(["models", "set", "notes", "--price-output", "2000"]) == 0
    assert stored().models == [CatalogueModel(NAME, {"price": {"output": "2000"}}, files)]
    assert model_entries(load_config())[-1].price.output == 2000
    assert main(["models", "remove", "ember"]) == 0
    assert stored().models[1:] == [CatalogueModel(BUILT_IN, {"serve": False}, [])]
    assert served() == [NAME]
    assert main(["models", "set", "ember", "--serve"]) == 0
    capsys.readouterr()
    assert main(["models", "remove", "notes"]) == 0
    assert "on no host" in capsys.readouterr().out
    assert [model.name for model in stored().models] == [BUILT_IN]
    assert served() == [BUILT_IN]
    assert (gateway / "model.safetensors").exists()
    assert stored().number == 5
    assert main(["audit", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(each["action"], each["target"]) for each in entries] == [
        ("cluster.init", "gateway/gw1"),
        ("model.add", NAME),
        ("model.change", NAME),
        ("model.add", BUILT_IN),
        ("model.change", BUILT_IN),
        ("model.remove", NAME),
    ]


def test_tokens_and_removals_are_in_the_audit_log_and_no_secret_of_theirs(
    gateway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "token", "--bare", "--uses", "2"]) == 0
    token = capsys.readouterr().out.strip()
    assert main(["cluster", "remove", "gw1"]) == 0
    capsys.readouterr()
    assert main(["audit", "list", "--json"]) == 0
    text = capsys.readouterr().out
    _, made, removed = json.loads(text)
    assert (made["action"], made["detail"]["uses"]) == ("cluster.token", 2)
    assert (removed["action"], removed["target"]) == ("cluster.remove", "gateway/gw1")
    assert made["target"] in token
    assert token.rpartition(".")[2] not in text


def test_of_two_hosts_that_change_one_model_the_later_is_told_so(
    gateway: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = CatalogueModel(NAME, {"description": "the other host's"}, [])
    monkeypatch.setattr(add, "try_prompt", lambda *_: put(other))
    assert main(["models", "add", NAME, str(gateway)]) == 1
    said = capsys.readouterr().err
    assert "@cf/acme/notes was changed on another host meanwhile (revision 1 of the catalogue)" in said
    assert stored().models == [other]


def test_changes_of_other_models_do_not_disturb_but_names_are_given_once(
    gateway: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = CatalogueModel("@cf/acme/other", {"aliases": ["n"]}, [])
    monkeypatch.setattr(add, "try_prompt", lambda *_: put(other))
    assert main(["models", "add", NAME, str(gateway), "--alias", "n"]) == 1
    assert "n is a name of @cf/acme/other" in capsys.readouterr().err
    monkeypatch.setattr(add, "try_prompt", lambda *_: put(structs.replace(other, settings={})))
    assert main(["models", "add", NAME, str(gateway), "--alias", "n"]) == 0
    assert [model.name for model in stored().models] == [NAME, "@cf/acme/other"]


def test_settings_that_hold_on_one_host_alone_are_refused(gateway: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = CatalogueModel(NAME, {"folder": "/etc", "public_prefixes": ["/etc/passwd"]}, [])
    unknown = CatalogueModel("@cf/acme/new", {"of_a_later_version": 1}, [])
    put(hostile, unknown)
    assert main(["models", "list"]) == 0
    assert served() == [BUILT_IN], "what this host cannot take it leaves out, and the rest goes on"


def test_a_machine_s_host_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = host_maker(Path("hosts"))
    hosts.host(HostRole.MACHINE, "m1")
    Path(".hearth").mkdir()
    shutil.copytree("hosts/m1", ".hearth/identity")
    for words in (["add", NAME, str(folder)], ["set", "ember", "--pinned"], ["remove", "ember"]):
        assert main(["models", *words]) != 0
        assert "this host is the machine m1 of a cluster" in capsys.readouterr().err
    assert served() == [BUILT_IN]


def test_while_the_store_is_away_nothing_changes_and_it_is_said(
    gateway: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "add", NAME, str(gateway)]) == 0
    Path("hearth.toml").write_text('[store]\nurl = "redis://127.0.0.1:1/0"\n')
    for words in (["set", "notes", "--pinned"], ["remove", "notes"]):
        assert main(["models", *words]) != 0
        assert "the catalogue of the cluster cannot be asked now" in capsys.readouterr().err
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr()
    assert NAME in shown.out
    assert "how far other hosts are is not known" in shown.err


def test_what_was_told_before_a_host_joined_stays_its_own(folder: Path) -> None:
    assert main(["models", "add", NAME, str(folder)]) == 0
    assert main(["cluster", "init", "--name", "gw1"]) == 0
    assert main(["models", "set", "notes", "--pinned"]) == 0
    assert stored() == ClusterCatalogue()
    assert main(["models", "remove", "notes"]) == 0
    assert served() == [BUILT_IN]


def test_a_pulled_model_is_shared_with_where_the_hub_has_it(gateway: Path) -> None:
    pulled = Path(".hearth/models/org/name").resolve()
    shutil.copytree(gateway, pulled)
    (pulled / "revision").write_text("c0ffee\n")
    assert served() == [BUILT_IN, "@hf/org/name"]
    assert main(["models", "add", "@hf/org/name", str(pulled)]) == 0
    (model,) = stored().models
    assert (model.name, model.hub) == ("@hf/org/name", "org/name@c0ffee")
    assert served() == [BUILT_IN, "@hf/org/name"]


def test_the_host_that_does_not_get_a_model_is_named(gateway: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", NAME, str(gateway)]) == 0
    total = sum(file.bytes for file in stored().models[0].files)
    progress = ModelProgress(NAME, "failed", 1, total, "the disk is full")
    ask(lambda store: store.report_catalogue(HostCatalogue("gateway/gw1", "1-a", [progress])))
    capsys.readouterr()
    assert main(["models", "list", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)[-1]
    assert notes["hosts"]["gateway gw1"]["problem"] == "the disk is full"
    assert main(["models", "list"]) == 0
    assert "gateway gw1: failed, 1 B of 533.7 KiB: the disk is full" in capsys.readouterr().out
    (finding,) = cluster_models(load_config())
    assert finding.verdict is FindingLevel.WRONG
    assert "gateway gw1 does not get @cf/acme/notes: the disk is full" in finding.found


def test_doctor_names_a_model_that_this_host_has_another_entry_for(gateway: Path) -> None:
    assert main(["models", "add", NAME, str(gateway)]) == 0
    Path("hearth.toml").write_text(f'[[models]]\nname = "{NAME}"\ncontext_tokens = 64\n')
    (entry,) = [entry for entry in model_entries(load_config()) if entry.name == NAME]
    assert (entry.context_tokens, entry.folder is not None) == (64, True), "hearth.toml counts on its host"
    (finding,) = cluster_models(load_config())
    assert "is a model of the cluster, and has a [[models]]" in finding.found


def test_a_host_of_no_cluster_has_no_mirror(folder: Path) -> None:
    assert main(["models", "add", NAME, str(folder)]) == 0
    config: Config = load_config()
    assert read_mirror(config.cluster.mirror_path(config.state)).own == ""
    assert list(cluster_models(config)) == []
    assert list(Path(".hearth").glob("added/**/*.toml"))
