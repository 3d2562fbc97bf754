"""docs/many-hosts.md, walked through on three hosts of a network of their own with a real Redis: every command of the
page, as it is written there, with this network's addresses. And what compose.hosts.yaml says, without Docker."""

import json
import re
import shlex
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

from gateway.cluster.stream import pack_token_ids
from tests.support import network
from tests.support.network import NetworkHost, captured
from tests.support.redis_server import DURABLE, program
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "many-hosts.md"
HEARTH = [sys.executable, "-P", "-m", "gateway.cli"]
CANARY = "marmalade 7f3a9c in the clear"
MODEL = "@cf/hearth/ember"
pytestmark = pytest.mark.skipif(not network.possible(), reason="it takes root on Linux to make network namespaces")


@dataclass
class Walk:
    """The page's commands, and what they printed."""

    hosts: dict[str, NetworkHost]
    token: str = ""
    join: str = ""
    printed: dict[str, str] = field(default_factory=dict)

    def step(self, host: str, line: str) -> None:
        """Runs one line of the page; what serves goes on behind."""
        for name, there in self.hosts.items():
            line = line.replace(name, there.address)
        words = shlex.split(line.replace("hearth-join.…", self.join).replace("$TOKEN", self.token))
        if words[0] == "curl":
            return  # the test calls by itself
        assert words[0] == "hearth", line
        there, command = self.hosts[host], [*HEARTH, *words[1:]]
        if words[1] in ("gateway", "machine"):
            there.start([*command, *(["--device", "cpu"] if words[1] == "machine" else [])], words[1])
        else:
            self.printed[" ".join(words[1:3])] = there.run(command)

    def call(self, prompt: str, gateway: NetworkHost | None = None, **options: float) -> str:
        url = f"{self.url(gateway)}/ai/run/{MODEL}"
        body = json.dumps({"prompt": prompt, "max_tokens": 8, **options}).encode()
        request = urllib.request.Request(url, body, {"authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["result"]["response"])

    def url(self, gateway: NetworkHost | None) -> str:
        return f"http://{(gateway or self.hosts['10.0.0.1']).address}:8787"

    def answers(self, path: str, gateway: NetworkHost | None = None) -> bool:
        """Whether the gateway, the first if none is named, says 200 there."""
        try:
            with urllib.request.urlopen(f"{self.url(gateway)}/{path}", timeout=5):
                return True
        except OSError:
            return False

    def wait_for_member(self, name: str) -> None:
        """As a member a machine is there from the moment it has joined."""
        words = [*HEARTH, "cluster", "members"]
        wait_for(lambda: name in self.hosts["10.0.0.1"].run(words), 60, f"{name} is a member")

    def machines(self) -> set[str]:
        """Those that `hearth top` shows as answering."""
        shown = json.loads(self.hosts["10.0.0.1"].run([*HEARTH, "top", "--json"]))
        return {each["name"] for each in shown["machines"] if not each["problem"]}


def packed(text: str) -> bytes:
    """The text as frames carry it, but for its ends, which depend on what is beside it."""
    tokenizer = Tokenizer.from_file(str(ROOT / "engine" / "builtin_model" / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[2:-2]
    assert len(ids) >= 4
    return pack_token_ids(ids)


def page_steps() -> Iterator[tuple[str, str]]:
    """(host, command) of each line of the page that is one."""
    for host, block in re.findall(r"```sh host=(\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        yield from ((host, line) for line in block.strip().splitlines())


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    with network.network(tmp_path, 3) as (first, second, third):
        (settings,) = re.findall(r"```toml\n(\[store\].*?)```", PAGE.read_text(), re.DOTALL)
        (first.folder / "hearth.toml").write_text(settings.replace("10.0.0.1", first.address))
        start_redis(first)
        yield Walk({"10.0.0.1": first, "10.0.0.2": second, "10.0.0.3": third})


def start_redis(host: NetworkHost) -> None:
    host.start([program(), "--bind", host.address, "--protected-mode", "no", *DURABLE], "redis")

    def redis_answers() -> bool:
        try:
            socket.create_connection((host.address, 6379), 1).close()
        except OSError:
            return False
        return True

    wait_for(redis_answers, what="Redis answers")


def test_the_page_works_as_it_is_written(walk: Walk) -> None:
    steps = list(page_steps())
    assert len(steps) >= 10
    for host, line in steps:
        if line.startswith("curl"):
            wait_for(lambda: walk.machines() == {"m2", "m3"}, 90, "both machines answer")
            wait_for(lambda: walk.answers("readyz"), 60, "a model is ready")
            first, second, third = (walk.hosts[f"10.0.0.{number}"].link for number in (1, 2, 3))
            with captured(first) as clear, captured(second) as sealed, captured(third) as sealed_too:
                for number in range(6):
                    assert walk.call(f"{CANARY} {number}")
                wait_for(lambda: min(sealed.packets, sealed_too.packets) > 0, 5, "each host says something")
            assert CANARY.encode() in clear.wire  # the client's own call, which is plain HTTP
            wire = sealed.wire + sealed_too.wire
            assert packed(CANARY) not in wire
            assert b"marmalade" not in wire
            continue
        walk.step(host, line)
        if line.startswith("hearth accounts"):
            walk.token = re.findall(r"hearth_\S+", walk.printed["accounts create"])[0]
        elif line.startswith("hearth gateway"):
            wait_for(lambda: walk.answers("healthz"), 60, "the gateway answers")
        elif line.startswith("hearth cluster token"):
            walk.join = re.findall(r"hearth-join\.\S+", walk.printed["cluster token"])[0]
        elif line.startswith("hearth machine"):
            walk.wait_for_member(line.split("--name ")[1].split()[0])
    assert "fra1" in walk.printed["cluster members"]
    began = time.monotonic()
    wait_for(lambda: walk.machines() == {"m2"}, 30, "the removed machine is gone")
    assert time.monotonic() - began < 10  # 5 s, and what two looks take on a busy machine
    assert walk.call("and the calls go on")
    wait_for(lambda: "was removed" in walk.hosts["10.0.0.3"].log("machine"), 30, "it is told why")
    second_gateway_opens_the_same_tokens(walk)


def second_gateway_opens_the_same_tokens(walk: Walk) -> None:
    """It joins on the third host, with the secret that is sealed to its key and no file of the first one's."""
    first, third = walk.hosts["10.0.0.1"], walk.hosts["10.0.0.3"]
    token = json.loads(first.run([*HEARTH, "cluster", "token", "--role", "gateway", "--json"]))
    (third.folder / "hearth.toml").write_text((first.folder / "hearth.toml").read_text())
    join = ["--join", token["join"][0], "--token", token["token"], "--name", "gw2"]
    third.start([*HEARTH, "gateway", "--state", "gw2", "--host", "0.0.0.0", *join], "gateway")
    wait_for(lambda: walk.answers("readyz", third), 60, "the second gateway sees the machine")
    assert walk.call("from the second gateway", third)
    assert (third.folder / "gw2" / "secret").read_bytes() == (first.folder / ".hearth" / "secret").read_bytes()


def test_what_compose_says_of_many_hosts_serves(tmp_path: Path) -> None:
    """Each service is a host, in the order of the file's own commands; names of services are addresses here."""
    text = (ROOT / "compose.hosts.yaml").read_text()
    document, steps = yaml.safe_load(text), re.findall(r"docker compose -f compose\.hosts\.yaml (.*?)\)?$", text, re.M)
    with network.network(tmp_path, 3) as made:
        hosts = dict(zip(("gateway", "machine-1", "machine-2"), made, strict=True))
        there = hosts["gateway"]
        walk, started = Walk({"10.0.0.1": there}), set[str]()

        def addressed(words: str) -> str:
            return re.sub(r'(?<=//)(gateway|redis)(?=:)|(?<=")gateway(?=")', there.address, words)

        def up(services: list[str]) -> None:
            for name in services or hosts:
                if name not in started:
                    words = [addressed(word) for word in document["services"][name]["command"][1:]]
                    kind = document["services"][name]["command"][0]
                    command = [*HEARTH, kind, *words, *(["--device", "cpu"] if kind == "machine" else [])]
                    hosts[name].start([word.replace("${HEARTH_JOIN:-}", walk.join) for word in command], kind)
                    started.add(name)

        (there.folder / "hearth.toml").write_text(addressed(document["configs"]["hearth"]["content"]))
        start_redis(there)
        for step in steps:
            match shlex.split(step):
                case ["run", "--rm", "gateway", *words] | ["exec", "gateway", "hearth", *words]:
                    if words[:2] == ["machines", "drain"]:
                        wait_for(lambda: walk.machines() == {"m1", "m2"}, 90, "both machines answer")
                        wait_for(lambda: walk.answers("readyz"), 60, "a model is ready")
                        assert walk.call("before a host is drained")
                    printed = there.run([*HEARTH, *words])
                    walk.join = printed.strip() if "--bare" in words else walk.join
                    walk.token = walk.token or next(iter(re.findall(r"hearth_\S+", printed)), "")
                case ["up", "-d", *services]:
                    up(services)
                    wait_for(lambda: walk.answers("healthz"), 60, "the gateway answers")
        assert walk.call("and after that")


def test_a_link_that_loses_packets_changes_no_answer_and_one_that_loses_all_loses_no_call(tmp_path: Path) -> None:
    """One of two machines is behind it; one way alone is cut, so that its host still hears the gateway."""
    with network.network(tmp_path, 3, lossy=[3]) as (first, second, third):
        wire, walk = third.wire, Walk({"10.0.0.1": first})
        assert wire is not None
        first.run([*HEARTH, "cluster", "init", "--name", "gw1"])
        walk.token = re.findall(r"hearth_\S+", first.run([*HEARTH, "accounts", "create", "acme"]))[0]
        first.start([*HEARTH, "gateway", "--host", "0.0.0.0"], "gateway")
        wait_for(lambda: walk.answers("healthz"), 60, "the gateway answers")
        join = json.loads(first.run([*HEARTH, "cluster", "token", "--uses", "2", "--json"]))
        for host, name in ((second, "m2"), (third, "m3")):
            words = [
                "--join",
                f"https://{join['join'][0]}",
                "--name",
                name,
                "--token",
                join["token"],
                "--device",
                "cpu",
            ]
            host.start([*HEARTH, "machine", *words], "machine")
        wait_for(lambda: walk.machines() == {"m2", "m3"}, 90, "both machines answer")
        wait_for(lambda: ready_machines(first) == {"m2", "m3"}, 60, "both have the model")

        def answer(number: int) -> str:
            return walk.call(f"question {number}", seed=number + 1, max_tokens=96)

        with ThreadPoolExecutor(12) as pool:
            calm = list(pool.map(answer, range(24)))
            wire.set(there=0.05, back=0.05, delay_s=0.01)
            with captured(third.link) as capture:
                assert list(pool.map(answer, range(24))) == calm
            assert capture.packets > 50, "the machine behind it answered too"
            running = [pool.submit(answer, number) for number in range(12)]
            wait_for(lambda: ready_machines(first) == {"m2", "m3"})
            wire.set(back=1.0)
            began = time.monotonic()
            assert [each.result() for each in running] == calm[:12]
            wait_for(lambda: walk.machines() == {"m2"}, 30, "the machine behind the cut is lost")
            assert time.monotonic() - began < 15
            wire.set()
            wait_for(lambda: walk.machines() == {"m2", "m3"}, 60, "it is back as the link is")


def ready_machines(gateway: NetworkHost) -> set[str]:
    """Those with a replica on a device."""
    shown = json.loads(gateway.run([*HEARTH, "top", "--json"]))
    return {each["name"] for each in shown["machines"] if any(one["residency"] == "DEVICE" for one in each["replicas"])}
