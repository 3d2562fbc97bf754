"""Hosts of a network of their own, each a network namespace on one bridge, and what is on the wire between them. It
needs root on Linux."""

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.lossy_wire import LossyWire, lossy_wire

_NUMBERS: Final = itertools.count()
_ALL_PROTOCOLS: Final = 0x0003
_HEADER_BYTES: Final = 14


def possible() -> bool:
    """Whether this process may make namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "hearth-probe"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", "hearth-probe"], capture_output=True)
    return made


@dataclass
class NetworkHost:
    """One host: programs run in its namespace, in its folder. On a `wire` packets can be lost, `there` from the bridge
    to it."""

    namespace: str
    link: str
    address: str
    folder: Path
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    wire: LossyWire | None = None

    def command(self, words: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def run(self, words: Sequence[str], within_s: float = 60.0) -> str:
        """What a program printed that ends by itself, and well."""
        done = subprocess.run(self.command(words), cwd=self.folder, capture_output=True, text=True, timeout=within_s)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self, words: Sequence[str], name: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(self.command(words), cwd=self.folder, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def plug(self, *, plugged: bool) -> None:
        """Pulls its cable, or puts it back: meanwhile nothing passes, and no connection ends."""
        _ip("link", "set", self.link, "up" if plugged else "down")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@contextlib.contextmanager
def network(folder: Path, hosts: int, *, lossy: Sequence[int] = ()) -> Iterator[list[NetworkHost]]:
    """So many hosts, and this process on the same bridge; those of the numbers `lossy` each behind a wire that can lose
    what passes."""
    own = next(_NUMBERS)  # of a network that has just ended, links may be there for a moment yet
    tag = f"h{os.getpid() % 10_000}n{own % 100}"
    net = f"10.{100 + os.getpid() % 100}.{(os.getpid() // 100 + own) % 250}"
    with contextlib.ExitStack() as stack:
        _ip("link", "add", tag, "type", "bridge")
        stack.callback(_ip, "link", "del", tag)
        _ip("addr", "add", f"{net}.254/24", "dev", tag)
        _ip("link", "set", tag, "up")
        made = []
        for number in range(1, hosts + 1):
            host = NetworkHost(f"{tag}-{number}", f"{tag}v{number}", f"{net}.{number}", folder / f"host-{number}")
            host.folder.mkdir()
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            if number in lossy:
                host.wire = stack.enter_context(lossy_wire(host.link, f"{host.link}e"))
                _ip("link", "set", f"{host.link}e", "netns", host.namespace, "name", "eth0")
            else:
                _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", host.link, "master", tag, "up")
            for words in (("addr", "add", f"{host.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                _ip("-n", host.namespace, *words)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            made.append(host)
        try:
            yield made
        finally:
            for host in made:
                for process in reversed(host.processes):
                    process.terminate()
            for host in made:
                for process in host.processes:
                    try:
                        process.wait(15)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Capture:
    """The bytes of all packets on one link, without their Ethernet headers."""

    wire: bytearray = field(default_factory=bytearray)
    packets: int = 0


def _is_of(packet: bytes, port: int) -> bool:
    """Whether an IPv4 packet is TCP's, from a port or to it."""
    ports = packet[(packet[0] & 15) * 4 :][:4]
    return packet[9] == socket.IPPROTO_TCP and port in (int.from_bytes(ports[:2]), int.from_bytes(ports[2:]))


@contextlib.contextmanager
def captured(link: str, port: int | None = None) -> Iterator[Capture]:
    """What passes on a link meanwhile; with a port, only its own TCP: other tests use this machine's loopback too."""
    capture, ended = Capture(), threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        tap.bind((link, 0))
        tap.settimeout(0.1)

        def read() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    packet = tap.recv(1 << 17)[_HEADER_BYTES:]
                    if port is None or _is_of(packet, port):
                        capture.wire += packet
                        capture.packets += 1

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield capture
        finally:
            ended.set()
            reader.join()
