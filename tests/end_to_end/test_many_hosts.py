"""docs/many-hosts.md, walked through on three hosts of a network of their own with a real Redis: every command of the
page, as it is written there, with this network's addresses."""

import json
import re
import shlex
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
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

    def call(self, prompt: str, gateway: NetworkHost | None = None) -> str:
        url = f"{self.url(gateway)}/ai/run/{MODEL}"
        body = json.dumps({"prompt": prompt, "max_tokens": 8}).encode()
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
        first.start([program(), "--bind", first.address, "--protected-mode", "no", *DURABLE], "redis")
        (settings,) = re.findall(r"```toml\n(\[store\].*?)```", PAGE.read_text(), re.DOTALL)
        (first.folder / "hearth.toml").write_text(settings.replace("10.0.0.1", first.address))

        def redis_answers() -> bool:
            try:
                socket.create_connection((first.address, 6379), 1).close()
            except OSError:
                return False
            return True

        wait_for(redis_answers, what="Redis answers")
        yield Walk({"10.0.0.1": first, "10.0.0.2": second, "10.0.0.3": third})


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
            assert CANARY.encode() in clear.wire  # the client's own call, which is plain HTTP
            wire = sealed.wire + sealed_too.wire
            assert packed(CANARY) not in wire
            assert b"marmalade" not in wire
            assert min(sealed.packets, sealed_too.packets) > 0
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
