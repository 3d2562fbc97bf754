import importlib.metadata
import json
import os
import shutil
import socket
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.hostinfo import gpus, memory
from gateway.catalogue.catalogue import BUILT_IN, folder_of
from gateway.cli import main
from gateway.commands.checks import host as host_checks
from gateway.identity.host_identity import HostRole
from gateway.settings.config import Config, ModelEntryConfig
from gateway.settings.reference import settings
from tests.support import minilm
from tests.support.certificates import write_certificate
from tests.support.fake_nvml import FakeGpu, install_nvml
from tests.support.hosts import host_maker
from tests.support.issuers import jwk

EMBER = folder_of(Config(), ModelEntryConfig(name=BUILT_IN))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hearth.toml").write_text(f"[server]\nport = {port}\n")
    return tmp_path


def examine(capsys: pytest.CaptureFixture[str], expected: int) -> dict[str, list[dict[str, Any]]]:
    """Findings by subject; the exit status is part of the answer."""
    assert main(["doctor", "--json"]) == expected
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(capsys.readouterr().out):
        found.setdefault(finding["subject"], []).append(finding)
    return found


def test_a_fresh_host_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    found = examine(capsys, 0)
    assert {"python", "engine", "gpu", "settings", "store", "model", "memory", "disk", "port"} == set(found)
    assert BUILT_IN in found["model"][0]["found"]


def test_a_replica_that_is_unlike_the_others_of_its_model_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Config(state_folder=str(here / ".hearth")).run_folder
    run.mkdir(parents=True, exist_ok=True)
    report = {"pid": os.getpid(), "unlike": [["tls:m2@10.0.0.3:8791/machine", "notes"]]}
    (run / "gateway-1.unlike.json").write_text(json.dumps(report))
    (run / "gateway-2.unlike.json").write_text(json.dumps({"pid": 2**22 + 1, "unlike": [["m9", "gone"]]}))
    (finding,) = [each for each in examine(capsys, 1)["machine"] if each["verdict"] == "wrong"]
    assert "m2@10.0.0.3:8791/machine: notes: its weights, tokenizer, template, KV layout or GPUs" in finding["found"]
    assert "it gets no calls" in finding["advice"]


def test_it_prints_a_line_for_people(capsys: pytest.CaptureFixture[str], port: int) -> None:
    assert main(["doctor"]) == 0
    assert f"127.0.0.1:{port} is free" in capsys.readouterr().out


def test_it_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examine(capsys, 0)
    assert [path.name for path in here.iterdir()] == ["hearth.toml"]


def test_a_taken_port_is_wrong(capsys: pytest.CaptureFixture[str], port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        (finding,) = examine(capsys, 1)["port"]
    assert finding["verdict"] == "wrong"
    assert "--port" in finding["advice"]


def test_a_redis_that_is_away_is_wrong_and_its_password_is_not_shown(
    here: Path, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    with (here / "hearth.toml").open("a") as file:
        file.write(f'[store]\nurl = "redis://:pa55word@127.0.0.1:{port}/0"\n')
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "pa55word" not in shown
    assert f"127.0.0.1:{port}" in shown


def test_a_redis_that_forgets_is_noted(here: Path, capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    with (here / "hearth.toml").open("a") as file:
        file.write(f'[store]\nurl = "{redis_url}"\n')
    found = examine(capsys, 0)["store"]
    assert found[0]["verdict"] == "ok"
    assert any("append" in finding["advice"] for finding in found[1:])


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_is_wrong(here: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    shutil.copytree(EMBER, here / "broken")
    (here / "broken" / missing).unlink()
    with (here / "hearth.toml").open("a") as file:
        file.write('[[models]]\nname = "@cf/mine/broken"\nfolder = "broken"\n')
    wrong = [finding for finding in examine(capsys, 1)["model"] if finding["verdict"] == "wrong"]
    assert len(wrong) == 1
    assert missing.removeprefix("model") in wrong[0]["found"]


def test_a_model_that_gives_vectors_is_told_as_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (here / "hearth.toml").open("a") as file:
        file.write(f'[[models]]\nname = "@cf/mine/vectors"\nfolder = "{minilm.folder()}"\n')
    told = [finding for finding in examine(capsys, 0)["model"] if "@cf/mine/vectors" in finding["found"]]
    assert [finding["verdict"] for finding in told] == ["ok"]
    assert "vectors of 384 numbers, texts of 256 tokens" in told[0]["found"]
    assert main(["models", "show", "@cf/mine/vectors", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["task"], shown["pooling"], shown["dimensions"]) == ("Text Embeddings", "mean", 384)
    assert (shown["max_input_tokens"], shown["kv_of_a_context_bytes"]) == (256, 0)


def test_a_pooling_that_is_not_served_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(minilm.folder(), here / "broken")
    (here / "broken" / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with (here / "hearth.toml").open("a") as file:
        file.write('[[models]]\nname = "@cf/mine/broken"\nfolder = "broken"\n')
    wrong = [finding for finding in examine(capsys, 1)["model"] if finding["verdict"] == "wrong"]
    assert "pooling max is not served" in wrong[0]["found"]


def test_a_model_that_does_not_fit_into_memory_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: (10 << 20, 10 << 20))
    monkeypatch.setattr(gpus, "installed_gpus", list)
    (finding,) = examine(capsys, 1)["model"]
    assert "of weights and 32.0 MiB for a context of 8,192 tokens are" in finding["found"]


def test_memory_that_others_use_is_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: (1 << 40, 10 << 20))
    monkeypatch.setattr(gpus, "installed_gpus", list)
    (finding,) = examine(capsys, 0)["memory"]
    assert (finding["verdict"], "10.0 MiB are free now" in finding["found"]) == ("note", True)


@pytest.mark.parametrize(
    ("installed", "handover_bytes", "verdict", "said"),
    [
        (False, 1 << 20, "note", "rack-1, but NIXL is not here"),
        (True, 0, "note", "rack-1, by NIXL 1.5.1, and no model hands KV over"),
        (True, 1 << 20, "ok", "rack-1, by NIXL 1.5.1"),
    ],
)
def test_nixl_is_looked_for_where_a_fabric_is_declared(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    installed: bool, handover_bytes: int, verdict: str, said: str,
) -> None:  # fmt: skip
    assert "fabric" not in examine(capsys, 0)
    with (here / "hearth.toml").open("a") as file:
        file.write(
            f'[machine]\nfabric = "rack-1"\n[[models]]\nname = "{BUILT_IN}"\nhandover_bytes = {handover_bytes}\n'
        )
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl") if installed else None)
    found = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.5.1" if name == "nixl" else found(name))
    (finding,) = examine(capsys, 0)["fabric"]
    assert (finding["verdict"], said in finding["found"]) == (verdict, True), finding
    assert installed or "hearth-server[nixl]" in finding["advice"]


def test_a_full_disk_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 5 << 20)
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda place: usage)
    assert examine(capsys, 1)["disk"][0]["verdict"] == "wrong"


class Host:
    """A host whose driver and torch say what the test wants, with a compiler and Python's headers."""

    def __init__(self, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.headers = here / "include"
        self.headers.mkdir()
        (self.headers / "Python.h").touch()
        monkeypatch.setenv("CC", "/usr/bin/their-cc")
        monkeypatch.setattr(host_checks.sysconfig, "get_paths", lambda scheme: {"include": str(self.headers)})

    def found(
        self, status: int, *installed: FakeGpu, cuda: str | None = "13.0", lacking: Sequence[str] = ()
    ) -> dict[str, list[dict[str, Any]]]:
        install_nvml(self._monkeypatch, installed, lacking=lacking)
        self._monkeypatch.setattr(gpus, "torch_cuda_version", lambda: cuda)
        return examine(self._capsys, status)


@pytest.fixture
def host(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(here, capsys, monkeypatch)


H200 = FakeGpu(free_mebibytes=143000)


def test_a_gpu_is_named_as_the_driver_names_it(host: Host) -> None:
    (finding,) = host.found(0, H200)["gpu"]
    assert finding["verdict"] == "ok"
    assert finding["found"] == "NVIDIA H200, 139.6 GiB of 140.4 GiB free, driver 580.65.06"
    assert "of 2 GPUs" in host.found(0, H200, H200)["memory"][0]["found"]


def test_what_kernels_need_is_looked_for_where_there_is_a_gpu(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kernels" not in host.found(0)
    (finding,) = host.found(0, H200)["kernels"]
    assert "/usr/bin/their-cc" in finding["found"]
    (host.headers / "Python.h").unlink()
    (finding,) = host.found(1, H200)["kernels"]
    assert "python3-dev" in finding["advice"]
    monkeypatch.delenv("CC")
    monkeypatch.setattr(host_checks.shutil, "which", lambda name: None)
    (finding,) = host.found(1, H200)["kernels"]
    assert (finding["verdict"], "gcc" in finding["advice"]) == ("wrong", True)


def test_a_torch_without_cuda_is_noted_with_what_to_install(host: Host) -> None:
    (finding,) = host.found(0, H200, cuda=None)["gpu"]
    assert finding["verdict"] == "note"
    assert "pip install" in finding["advice"]


def test_an_old_gpu_is_noted_for_it_leaves_models_to_the_cpu(host: Host) -> None:
    findings = host.found(0, FakeGpu("Tesla T4", 15360, 15000, (7, 5)))
    assert findings["gpu"][0]["verdict"] == "note"
    assert "7.5" in findings["gpu"][0]["advice"]
    assert "GPU" not in findings["memory"][0]["found"]


def test_a_busy_gpu_is_noted(host: Host) -> None:
    (finding,) = host.found(0, FakeGpu(free_mebibytes=20000))["gpu"]
    assert (finding["verdict"], "nvidia-smi" in finding["advice"]) == ("note", True)


def test_a_gpu_whose_memory_the_driver_does_not_know_is_none(host: Host) -> None:
    (finding,) = host.found(0, FakeGpu(mebibytes=None))["gpu"]
    assert "CPU" in finding["found"]


@pytest.mark.parametrize(
    ("mebibytes", "advice"), [(1064, "context_tokens"), (1044, "serve = false")], ids=["context", "weights"]
)
def test_a_model_that_no_gpu_holds_is_wrong_and_says_what_is_too_much(host: Host, mebibytes: int, advice: str) -> None:
    findings = host.found(1, FakeGpu("Small", mebibytes))
    (finding,) = findings["model"]
    assert finding["verdict"] == "wrong"
    assert "27.0 MiB of weights and 32.0 MiB for a context of 8,192 tokens" in finding["found"]
    assert advice in finding["advice"]


COPIES = "".join(
    f'[[models]]\nname = "@cf/mine/{{name}}"\nfolder = "{EMBER}"\n{{settings}}\n'.format(name=name, settings=settings)
    for name, settings in (("one", "{one}"), ("two", "{two}"))
)


def beside(here: Path, one: str = "", two: str = "", machine: str = "") -> None:
    """The built-in model three times, some 59 MiB each, with these settings."""
    with (here / "hearth.toml").open("a") as file:
        file.write(COPIES.format(one=one, two=two) + machine)


def test_models_that_do_not_fit_at_once_take_turns_and_host_memory_is_looked_at(
    host: Host, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = FakeGpu("Small", 1154)
    beside(here, one="priority = 2.0", two="kept_kv_bytes = 0", machine="[machine]\nmemory_bytes = 1200000000\n")
    found = host.found(0, small)
    assert "they take turns" in found["memory"][0]["found"]
    (standby,) = found["standby"]
    assert standby["verdict"] == "note"
    assert "expect @cf/hearth/ember to start from disk" in standby["advice"]
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: (8 << 30, 8 << 30))
    settings = (here / "hearth.toml").read_text()
    (here / "hearth.toml").write_text(settings.partition("[machine]")[0])
    assert host.found(0, small)["standby"][0]["verdict"] == "ok"
    with (here / "hearth.toml").open("a") as file:
        file.write("[machine]\nmemory_bytes = 9000000000\n")
    (standby,) = host.found(1, small)["standby"]
    assert (standby["verdict"], "this host has 8.0 GiB" in standby["found"]) == ("wrong", True)
    (here / "hearth.toml").write_text(settings.partition("[machine]")[0])
    assert "all at once" in host.found(0, small, small)["memory"][0]["found"]


def test_pinned_models_that_do_not_fit_together_are_wrong(host: Host, here: Path) -> None:
    beside(here, one="pinned = true", two="pinned = true\nreplicas = 2")
    (finding,) = host.found(1, FakeGpu("Small", 1154))["memory"]
    assert "those that are pinned do not fit together" in finding["found"]
    assert "what is pinned makes room for nothing" in finding["advice"]
    two = [FakeGpu("Small", 1114)] * 2  # enough in all, and none of them holds two
    (finding,) = host.found(1, *two)["memory"]
    assert "do not fit together" in finding["found"]


def test_a_model_that_what_is_pinned_never_leaves_room_for_is_wrong(host: Host, here: Path) -> None:
    beside(here, one="pinned = true", two="context_tokens = 16\nreplicas = 3")  # which are more, and each fits
    (finding,) = host.found(1, FakeGpu("Small", 1124))["memory"]
    assert "what is pinned leaves none to @cf/hearth/ember" in finding["found"]


def test_a_model_of_several_ranks_is_looked_for_on_as_many_gpus(host: Host, here: Path) -> None:
    beside(here, one="gpus = 2", two="gpus = 3")
    (_, pair, three) = host.found(1, H200, H200)["model"]
    assert (pair["verdict"], three["verdict"]) == ("ok", "wrong")
    assert "it cannot be cut into 3 ranks" in three["found"]
    assert "set gpus to one of 1, 2" in three["advice"]
    (_, pair, _) = host.found(1, H200)["model"]
    assert "gpus = 2, and models may use 1 here" in pair["found"]
    small = FakeGpu("Small", 1064)  # too small for the whole model, and not for half of it
    ember, pair, _ = host.found(1, small, small)["model"]
    assert (ember["verdict"], pair["verdict"]) == ("wrong", "ok")


@pytest.mark.parametrize(
    ("lacking", "verdict", "said"),
    [
        ((), "ok", "2 GPUs reach each other over NVLink (478 GB/s each way)"),
        (("NVLINK",), "note", "GPUs 0 and 1 (63 GB/s each way) have no NVLink between them: @cf/mine/one is for"),
        (("WRITE", "NVLINK"), "wrong", "GPUs 0 and 1 do not reach each other's memory"),
    ],
)
def test_what_ranks_need_between_gpus_is_looked_for_where_a_model_has_them(
    host: Host, here: Path, lacking: tuple[str, ...], verdict: str, said: str
) -> None:
    assert "ranks" not in host.found(0, H200, H200)
    beside(here, one="gpus = 2")
    assert "ranks" not in host.found(1, H200)
    (finding,) = host.found(int(verdict == "wrong"), H200, H200, lacking=lacking)["ranks"]
    assert (finding["verdict"], finding["found"][: len(said)]) == (verdict, said)


def test_how_a_model_is_shared_out_is_said_with_the_reason(host: Host, here: Path) -> None:
    beside(here, one='gpus = "auto"\nstages = "auto"')
    _, chosen = host.found(0, H200, H200)["ranks"]
    assert chosen["found"] == "@cf/mine/one: one GPU: it holds the weights and a context"
    small = FakeGpu("Small", 1064)  # too small for what a replica takes beside the weights: on all that there are
    links, chosen = host.found(1, small, small, lacking=("NVLINK",))["ranks"]
    assert "set `stages" in links["advice"]
    assert " ms in " in chosen["found"]
    assert "over PCI Express of 63 GB/s a busy step takes about" in chosen["found"]


def test_stages_are_looked_for_on_as_many_gpus(host: Host, here: Path) -> None:
    beside(here, one="stages = 2", two="gpus = 2\nstages = 2")
    (_, pair, four) = host.found(1, H200, H200)["model"]
    assert (pair["verdict"], four["verdict"]) == ("ok", "wrong")
    assert "gpus = 2 in 2 stages, and models may use 2 here" in four["found"]


def test_a_pair_of_gpus_whose_links_carry_less_is_named(host: Host, here: Path) -> None:
    beside(here, one="gpus = 2")
    (finding,) = host.found(0, H200, H200, H200._replace(links=17))["ranks"]
    assert finding["verdict"] == "note"
    assert finding["found"] == (
        "GPUs 0 and 2 (452 GB/s each way), 1 and 2 (452 GB/s each way): NVLink carries less than the 478 GB/s of others"
    )


def test_links_between_gpus_without_a_switch_count_for_their_pair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wires = {"a": (("b", 4), ("c", 2)), "b": (("a", 4),), "c": (("a", 2),)}
    install_nvml(monkeypatch, [FakeGpu(uuid=uuid, links=0, wired=wired) for uuid, wired in wires.items()])
    pairs = {(pair.first, pair.second): pair.bytes_per_s for pair in gpus.gpu_pairs([0, 1, 2])}
    assert pairs == {(0, 1): 4 * 26_562_000_000, (0, 2): 2 * 26_562_000_000, (1, 2): 0}


def test_gpus_of_several_kinds_are_wrong_for_a_model_of_several_ranks(host: Host, here: Path) -> None:
    beside(here, one='gpus = "auto"')
    finding, _ = host.found(1, H200, FakeGpu("NVIDIA H100"))["ranks"]
    assert "GPU 0 is NVIDIA H200; GPU 1 is NVIDIA H100" in finding["found"]


def test_the_cuda_of_the_installed_torch_is_read_without_importing_it() -> None:
    import torch

    assert gpus.torch_cuda_version() == torch.version.cuda


def test_wrong_settings_are_found_and_the_rest_is_still_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "hearth.toml").write_text("[server]\nprot = 1\n")
    found = examine(capsys, 1)
    assert "prot" in found["settings"][0]["found"]
    assert found["python"][0]["verdict"] == "ok"


def test_all_settings_are_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--settings"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {key} " in shown for key, _, _ in settings())


def test_issuers_keys_are_looked_at(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [jwk("ES256", "1"), jwk("ES256 next", "2")]
    (here / "keys.json").write_text(json.dumps({"keys": keys}))
    for name, algorithm, file in (
        ("good", "ES256", "keys.json"), ("other", "EdDSA", "keys.json"), ("away", "ES256", "none.json"),
    ):  # fmt: skip
        with (here / "hearth.toml").open("a") as settings:
            settings.write(
                f"[[issuers]]\nname = '{name}'\nissuer = '{name}'\naudience = 'a'\n"
                f"algorithm = '{algorithm}'\njwks_file = '{file}'\n"
            )
    good, other, away = examine(capsys, 1)["issuer"]
    assert (good["verdict"], other["verdict"], away["verdict"]) == ("ok", "wrong", "wrong")
    assert "2 keys" in good["found"]
    assert "no key for EdDSA" in other["found"]
    assert "none.json" in away["found"]


@pytest.mark.parametrize(
    ("days", "verdict", "said"), [(200, "ok", "200 days"), (5, "note", "5 days"), (-3, "wrong", "expired")]
)
def test_it_says_when_the_certificate_ends(
    here: Path, port: int, capsys: pytest.CaptureFixture[str], days: int, verdict: str, said: str
) -> None:
    write_certificate(here, days=days)
    settings = f'[server]\nport = {port}\ncertificate = "certificate.pem"\nkey = "key.pem"\n'
    (here / "hearth.toml").write_text(settings)
    (finding,) = examine(capsys, int(verdict == "wrong"))["tls"]
    assert finding["verdict"] == verdict
    assert said in finding["found"].replace("199 days", "200 days").replace(" 4 days", " 5 days")


def test_a_key_that_others_can_read_or_that_is_missing_is_said(
    here: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_certificate(here)
    settings = f'[server]\nport = {port}\ncertificate = "certificate.pem"\nkey = "key.pem"\n'
    (here / "hearth.toml").write_text(settings)
    Path(paths["key"]).chmod(0o644)
    assert "chmod 600" in examine(capsys, 0)["tls"][1]["advice"]
    Path(paths["key"]).unlink()
    (finding,) = examine(capsys, 1)["tls"]
    assert "cannot be read" in finding["found"]


def test_it_says_who_the_host_is_in_its_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts, folder = host_maker(here / "hosts"), here / ".hearth" / "identity"
    hosts.host(HostRole.GATEWAY, "gw1", region="eu-west")
    shutil.copytree(hosts.folder / "gw1", folder)
    (finding,) = examine(capsys, 0)["cluster"]
    assert "gateway gw1 (region eu-west) of test, its certificate until" in finding["found"]
    for age_h, expected, words in ((20, 0, "should have been renewed 5 h ago"), (25, 1, "--join with a new --token")):
        hosts.host(HostRole.GATEWAY, "gw1", age_s=age_h * 3600)
        shutil.copytree(hosts.folder / "gw1", folder, dirs_exist_ok=True)
        (finding,) = examine(capsys, expected)["cluster"]
        assert words in finding["advice"]
    (folder / "key.pem").write_text("none")
    (finding,) = examine(capsys, 1)["cluster"]
    assert "no unencrypted private key" in finding["found"]
