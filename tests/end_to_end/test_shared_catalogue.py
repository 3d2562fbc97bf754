"""One catalogue over three hosts, each a folder with processes of its own: a model that is added on the gateway's host
is served by machines that never had it, and a peer that gives damaged files is left for the next one."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.catalogue.manifest import read_manifest
from gateway.cluster.route import preference
from tests.support.redis_server import free_port
from tests.support.tiny_model import write_tiny
from tests.support.waiting import wait_for

HEARTH = [sys.executable, "-P", "-m", "gateway.cli"]
WITHIN_S = 120.0


@dataclass
class Host:
    """A host's folder, and what runs there."""

    folder: Path
    settings: str
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        only = '[[models]]\nname = "@cf/hearth/ember"\nserve = false\n'
        (self.folder / "hearth.toml").write_text(f"{self.settings}\n{only}")

    def run(self, *words: str) -> str:
        done = subprocess.run([*HEARTH, *words], cwd=self.folder, capture_output=True, text=True, timeout=WITHIN_S)
        assert done.returncode == 0, (words, done.stdout, done.stderr, self.logs)
        return done.stdout

    def refused(self, *words: str) -> str:
        done = subprocess.run([*HEARTH, *words], cwd=self.folder, capture_output=True, text=True, timeout=WITHIN_S)
        assert done.returncode == 1, (words, done.stdout, done.stderr)
        return done.stderr

    def start(self, *words: str) -> None:
        with (self.folder / "log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [*HEARTH, *words]
            self.processes.append(subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=environment))

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
        self.processes.clear()

    @property
    def logs(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    def fetched(self, folder: Path) -> Path | None:
        """The folder here that has the same files, bit for bit."""
        wanted = read_manifest(folder, lambda _: True)
        for path in (self.folder / ".hearth" / "models" / ".cluster").glob("*"):
            if {(file.name, file.sha256) for file in read_manifest(path, lambda _: True)} == {
                (file.name, file.sha256) for file in wanted
            }:
                return path
        return None


@dataclass
class SmallCluster:
    """A gateway and two machines on 127.0.0.1."""

    gateway: Host
    machines: list[Host]
    port: int
    join: str
    token: str = ""

    def machine(self, number: int) -> Host:
        return self.machines[number - 1]

    def start_machine(self, number: int) -> None:
        token = self.gateway.run("cluster", "token", "--bare").strip()
        join = ["--join", self.join, "--name", f"m{number}", "--token", token]
        self.machine(number).start("machine", "--device", "cpu", *join)

    def call(self, model: str) -> str:
        body = json.dumps({"prompt": "Hello", "max_tokens": 4, "temperature": 0}).encode()
        url = f"http://127.0.0.1:{self.port}/ai/run/{model}"
        request = urllib.request.Request(url, body, {"authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return str(json.load(answer)["result"]["response"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    port, join = free_port(), f"127.0.0.1:{free_port()}"
    gateway = Host(folder / "gw1", f'[cluster]\naddress = "127.0.0.1"\njoin_listen = "{join}"\n[server]\nport = {port}')
    places = [f'[cluster]\nporter_listen = "127.0.0.1:{free_port()}"' for _ in range(2)]
    machines = [Host(folder / f"m{number}", place) for number, place in enumerate(places, 1)]
    made = SmallCluster(gateway, machines, port, join)
    try:
        gateway.run("cluster", "init", "--name", "gw1")
        made.token = re.findall(r"hearth_\S+", gateway.run("accounts", "create", "acme"))[0]
        gateway.start("gateway")
        wait_for(lambda: "gw1" in gateway.run("cluster", "members"), WITHIN_S, "the gateway is there")
        made.start_machine(1)
        yield made
    finally:
        for host in (*machines, gateway):
            host.stop()


@pytest.mark.timeout(400)  # eleven programs start on the way
def test_a_model_that_is_added_on_one_host_is_served_by_others_that_fetch_it(
    cluster: SmallCluster, tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path / "notes")
    gateway, first, second = cluster.gateway, cluster.machine(1), cluster.machine(2)
    wait_for(lambda: "m1" in gateway.run("cluster", "members"), WITHIN_S, "the machine joins")
    gateway.run("models", "add", "notes", str(folder), "--untried", "--alias", "n", "--wait")
    assert wait_for(lambda: first.fetched(folder), WITHIN_S, first.logs)
    assert cluster.call("notes") == cluster.call("n")
    assert "gateway's host" in first.refused("models", "remove", "notes")

    # A host that comes later asks the gateway's host first, whose folder is damaged by now, and then the other machine.
    name = next(name for name in map("later{}".format, range(99)) if gateway_first(name))
    later = write_tiny(tmp_path / "later")
    weights = later / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    gateway.run("models", "add", name, str(later), "--untried", "--wait")
    good = read_manifest(later, lambda _: True)
    copied = wait_for(lambda: first.fetched(later), WITHIN_S, first.logs)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x02")
    cluster.start_machine(2)
    wait_for(lambda: second.fetched(copied), WITHIN_S, second.logs)
    assert "gateway/gw1 gave model.safetensors damaged" in second.logs
    (arrived,) = [path for path in [second.fetched(copied)] if path is not None]
    assert read_manifest(arrived, lambda _: True) == good
    first.stop()
    assert cluster.call(name), "the machine that fetched it from its peer serves it"

    def is_shown_ready() -> bool:
        shown = json.loads(gateway.run("models", "list", "--json"))
        (notes,) = [model for model in shown if model["name"] == "notes"]
        return notes["hosts"].get("machine m2", {}).get("state") == "ready"

    wait_for(is_shown_ready, WITHIN_S, gateway.run("models", "list"))
    gateway.run("models", "remove", "notes", "--wait")
    with pytest.raises(urllib.error.HTTPError):
        cluster.call("notes")


def gateway_first(model: str) -> bool:
    """Whether m2 asks the gateway's host for this model before it asks m1."""
    own = "machine/m2" + model
    return preference("gateway/gw1", 1.0, own) > preference("machine/m1", 1.0, own)
