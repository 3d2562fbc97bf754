"""Two cells in two regions, each a network namespace with a store of its own, and calls of accounts that are bound to
one of them: what of their texts is then found in the other region, in packets, files, stores, logs, traces and memory.

Set wrongly are the other region's gateway, whose file claims the calls' region, and a machine there that does the same
and that the calls' own gateway reaches; traces of all go to a collector there. Certificates alone say the truth.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import string
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from tests.end_to_end.canary import Canaries
from tests.support.network import Capture, NetworkHost, network
from tests.support.redis_server import DURABLE, program
from tests.support.waiting import wait_for

ROOT: Final = Path(__file__).parents[2]
HEARTH: Final = [sys.executable, "-P", "-m", "gateway.cli"]
MODEL: Final = "@cf/hearth/ember"
PORT: Final = 8787
COLLECTOR: Final = 4318
START_S: Final = 180.0
CALL_S: Final = 120.0
INSIDE: Final = "eu"
OUTSIDE: Final = "us"


@dataclass(frozen=True)
class Answered:
    """`sent`: the body left this client."""

    status: int
    headers: dict[str, str]
    body: str
    sent: bool


@dataclass
class RegionWorld:
    """All that runs. `token` is of an account that is bound to INSIDE, `free` of one that is not bound."""

    inside: NetworkHost
    inside_machine: NetworkHost
    outside: NetworkHost
    outside_machine: NetworkHost
    token: str = ""
    free: str = ""

    @property
    def outsiders(self) -> tuple[NetworkHost, NetworkHost]:
        return self.outside, self.outside_machine

    def kill_a_replica(self) -> None:
        """The process of the inside machine that has most memory of its own: its calls are tried again."""
        sizes = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids(self.inside_machine)}
        os.kill(max(sizes, key=lambda pid: sizes[pid]), signal.SIGKILL)

    def seen(self, canaries: Canaries, wires: dict[str, Capture]) -> Counter[str]:
        """How many texts, or forms of them, each place outside has; Redis has written all that it knows to its
        files."""
        self.outside.run([program().replace("redis-server", "redis-cli"), "-h", self.outside.address, "SAVE"])
        found: Counter[str] = Counter()
        for place, wire in wires.items():
            found[f"packets of {place}"] = in_bytes(canaries, bytes(wire.wire))
        for name, host in zip(("gateway", "machine"), self.outsiders, strict=True):
            for path in sorted(host.folder.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    found[f"files of the {name}"] += in_bytes(canaries, path.read_bytes())
            for pid in pids(host):
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                    found[f"memory of the {name}"] += sum(1 for _ in canaries.in_memory(pid))
        return found


def in_bytes(canaries: Canaries, held: bytes) -> int:
    """How many texts there are by their own words, and forms in which there are others."""
    words = set(re.findall(re.escape(canaries.patterns["in utf-8"]) + rb"[a-z]{6}", held))
    return len(words) + sum(hit.form not in ("in utf-8", "the end in utf-8") for hit in canaries.find("", held))


def pids(host: NetworkHost) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
    return [int(word) for word in listed.stdout.split()]


def make_canaries(seed: int) -> Canaries:
    """Texts that are found as tokens too, in 16 bits as in 32."""
    canaries = Canaries(seed)
    tokenizer = Tokenizer.from_file(str(ROOT / "engine" / "builtin_model" / "tokenizer.json"))
    canaries.watch_prompts(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids))
    packed = canaries.patterns["tokens of a prompt as u32"]
    ids = struct.unpack(f"<{len(packed) // 4}I", packed)
    canaries.patterns["tokens of a prompt as u16"] = struct.pack(f"<{len(ids)}H", *ids)
    return canaries


def letters(number: int) -> str:
    word = ""
    for _ in range(6):
        number, rest = divmod(number, 26)
        word = string.ascii_lowercase[rest] + word
    return word


# ---- what runs ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def region_world(folder: Path) -> Iterator[RegionWorld]:
    with network(folder, 4) as (inside, inside_machine, outside, outside_machine):
        world = RegionWorld(inside, inside_machine, outside, outside_machine)
        outside.start([sys.executable, "-m", "tests.support.region_world", "traces"], "collector")
        for name, host, other in ((INSIDE, inside, outside), (OUTSIDE, outside, inside)):
            _found_cell(name, host, other)
        for host, other in ((inside, outside), (outside, inside)):
            authority = other.folder / ".hearth" / "identity" / "authority.pem"
            (host.folder / "other-authority.pem").write_bytes(authority.read_bytes())
            host.start([*HEARTH, "gateway", "--host", "0.0.0.0"], "gateway")
        for host in (inside, outside):
            wait_for(lambda host=host: _listens(host), START_S, "the gateway answers")
        for host, name, region in ((inside_machine, "m1", INSIDE), (outside_machine, "m2", OUTSIDE)):
            _join(inside, host, name, region)
        made = json.loads(inside.run([*HEARTH, "accounts", "create", "bound", "--json"]))
        inside.run([*HEARTH, "accounts", "settings", "bound", "--regions", INSIDE])
        free = json.loads(inside.run([*HEARTH, "accounts", "create", "free", "--json"]))
        world.token, world.free = made["token"], free["token"]

        def both() -> bool:
            shown = json.loads(inside.run([*HEARTH, "top", "--json"]))
            return {each["name"] for each in shown["machines"] if not each["problem"]} == {"m1", "m2"}

        wait_for(both, START_S, "both machines answer")
        yield world


def _settings(host: NetworkHost, *lines: str) -> None:
    collector = f"{host.address.rpartition('.')[0]}.3"  # the outside gateway's host
    common = [
        *("[log]", 'level = "debug"', 'format = "json"'),
        *("[telemetry]", f'otlp_url = "http://{collector}:{COLLECTOR}/v1/traces"', f'otlp_region = "{OUTSIDE}"'),
        *("[server]", f'region = "{INSIDE}"'),  # outside that is a lie
    ]
    (host.folder / "hearth.toml").write_text("\n".join([*common, *lines]) + "\n")


def _found_cell(name: str, host: NetworkHost, other: NetworkHost) -> None:
    host.start([program(), "--bind", host.address, "--protected-mode", "no", *DURABLE], "redis")
    inside = other if name == OUTSIDE else host
    _settings(
        host,
        f'region_urls = {{ {INSIDE} = "http://{inside.address}:{PORT}" }}' if name == OUTSIDE else "",
        *("[store]", f'url = "redis://{host.address}:6379/0"'),
        *("[cells]", "[[cells.others]]", f'name = "{OUTSIDE if name == INSIDE else INSIDE}"'),
        *(f'addresses = ["{other.address}:8792"]', 'authority = "other-authority.pem"'),
    )
    wait_for(lambda: _listens(host, 6379), START_S, "Redis answers")
    host.run([*HEARTH, "cluster", "init", "--cluster", name, "--region", name, "--name", f"gw-{name}"])


def _join(gateway: NetworkHost, host: NetworkHost, name: str, region: str) -> None:
    words = ["cluster", "token", "--name", name, "--region", region, "--json"]
    token = json.loads(gateway.run([*HEARTH, *words]))
    _settings(host)
    join = ["--join", f"{gateway.address}:8790", "--name", name, "--token", token["token"]]
    host.start([*HEARTH, "machine", "--device", "cpu", *join], "machine")


def _listens(host: NetworkHost, port: int = PORT) -> bool:
    try:
        socket.create_connection((host.address, port), 1).close()
    except OSError:
        return False
    return True


class _Intake(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        with Path("traces.bin").open("ab") as file:
            file.write(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


# ---- what is called ----------------------------------------------------------------------------------------------


async def call(host: NetworkHost, token: str, path: str, body: dict[str, Any], **headers: str) -> Answered:
    """One call on a connection of its own. With `expect` the body is sent where the server asks for it alone."""
    packed = json.dumps(body).encode()
    head = {"host": "test", "authorization": f"Bearer {token}", "content-length": str(len(packed)), **headers}
    async with asyncio.timeout(CALL_S):
        reader, writer = await asyncio.open_connection(host.address, PORT)
        try:
            lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            writer.write(f"POST {path} HTTP/1.1\r\nconnection: close\r\n{lines}\r\n".encode())
            sent = "expect" not in headers
            if sent:
                writer.write(packed)
            status, answered = await _head(reader)
            if status == 100:
                writer.write(packed)
                sent = True
                status, answered = await _head(reader)
            return Answered(status, answered, (await reader.read()).decode(errors="replace"), sent)
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    named = (line.partition(":") for line in lines if line)
    return int(status.split()[1]), {name.lower(): value.strip() for name, _, value in named}


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", COLLECTOR), _Intake).serve_forever()
