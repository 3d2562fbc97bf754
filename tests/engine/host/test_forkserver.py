"""engine/host/forkserver.py and engine/replica/zygote.py as real processes. Most forks only tell what they find
themselves to be."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from engine.host.forkserver import ForkserverLauncher
from engine.host.launchers import open_launcher, zygote_modules
from engine.host.supervisor import ReplicaProcess, SubprocessLauncher
from engine.hostinfo.cpu import waiting_environment
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol.frames import FrameReader, Hello
from engine.protocol.specs import MachineSpec, ModelSpec, ReplicaSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each replica is a new program")
ROOT = Path(__file__).parents[3]
EMBER = ROOT / "engine" / "builtin_model"
PROGRAM = [sys.executable, "-c", "print('a program')"]


def spec_of(name: str, folder: Path) -> ReplicaSpec:
    model = ModelSpec(name=name, folder=str(EMBER), kv_bytes=1 << 24)
    address = f"unix:{folder}/replica.sock"
    return ReplicaSpec(model=model, address=address, pulse=str(folder / "pulse"), boot=1, device="cpu", threads=1)


@contextlib.contextmanager
def open_forks(*modules: str) -> Iterator[ForkserverLauncher]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with contextlib.closing(
            ForkserverLauncher(modules, SubprocessLauncher(lambda spec: PROGRAM), time.monotonic)
        ) as forks:
            yield forks


def warm(forks: ForkserverLauncher) -> None:
    wait_for(lambda: forks.ready(time.monotonic()))


@pytest.fixture(scope="module")
def spied() -> Iterator[ForkserverLauncher]:
    with open_forks("tests.support.zygote_spy") as forks:
        warm(forks)
        yield forks


def read_line(process: ReplicaProcess) -> str:
    line = b""
    while not line.endswith(b"\n"):
        got = os.read(process.output, 1)
        assert got, line
        line += got
    return line.decode()


def told(process: ReplicaProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_line(process))
    return found


@contextlib.contextmanager
def started(forks: ForkserverLauncher, name: str, folder: Path, **environment: str) -> Iterator[ReplicaProcess]:
    process = forks.start(spec_of(name, folder), environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.close()


def test_a_fork_is_a_child_of_this_process_with_everything_imported(spied: ForkserverLauncher, tmp_path: Path) -> None:
    assert spied.zygote is not None
    with started(spied, "stays", tmp_path) as process:
        found = told(process)
        assert (found["pid"], found["parent"]) == (process.pid, os.getpid())
        assert found["imported_by"] == spied.zygote
        assert psutil.Process(process.pid).cmdline()[:2] == ["engine.replica.server", "stays"]


def test_a_fork_has_an_environment_and_descriptors_of_its_own(spied: ForkserverLauncher, tmp_path: Path) -> None:
    with started(spied, "ends", tmp_path, GIVEN_BY_THE_TEST="to this one") as process:
        found = told(process)
        assert found["environment"] == "to this one"
        assert (found["blocked"], found["handled"]) == ([], [True] * 3)
        output = os.readlink(f"/proc/self/fd/{process.output}")
        assert sorted(found["files"].items()) == [("0", "/dev/null"), ("1", output), ("2", output)]
    with started(spied, "ends", tmp_path) as process:
        assert told(process)["environment"] is None


def test_the_end_of_a_fork_ends_its_output(spied: ForkserverLauncher, tmp_path: Path) -> None:
    with started(spied, "ends", tmp_path) as process:
        told(process)
        assert os.read(process.output, 1) == b""
        assert process.wait() == 3


def test_a_fork_that_is_killed_says_so(spied: ForkserverLauncher, tmp_path: Path) -> None:
    with started(spied, "stays", tmp_path) as process:
        told(process)
        assert process.poll() is None
        process.terminate()
        assert process.wait() == -signal.SIGTERM
        process.kill()  # its number may be another's by now
        assert process.poll() == -signal.SIGTERM


def test_a_fork_that_is_told_to_end_at_once_ends(spied: ForkserverLauncher, tmp_path: Path) -> None:
    for _ in range(5):
        with started(spied, "stays", tmp_path) as process:
            process.terminate()
            assert process.wait() == -signal.SIGTERM


def test_the_zygote_leaves_signals_to_the_machine(spied: ForkserverLauncher, tmp_path: Path) -> None:
    assert spied.zygote is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(spied.zygote, number)
    with started(spied, "stays", tmp_path) as process:
        assert told(process)["imported_by"] == spied.zygote


def test_descendants_that_lose_their_parent_are_collected(spied: ForkserverLauncher, tmp_path: Path) -> None:
    before = psutil.Process().children()
    with started(spied, "leaves an orphan", tmp_path) as process:
        told(process)
        process.wait()
        orphans = [child for child in psutil.Process().children() if child not in before and child.pid != spied.zygote]
        assert len(orphans) == 1
        wait_for(lambda: spied.ready(time.monotonic()) and not orphans[0].is_running())


def test_forks_outlive_the_zygote_and_programs_stand_in_for_it(tmp_path: Path) -> None:
    with open_forks("tests.support.zygote_spy") as forks:
        warm(forks)
        first = forks.zygote
        assert first is not None
        with started(forks, "stays", tmp_path) as process:
            told(process)
            os.kill(first, signal.SIGKILL)
            psutil.wait_procs([psutil.Process(first)], timeout=30)
            with started(forks, "ends", tmp_path) as program:
                assert read_line(program) == "a program\n"
            assert process.poll() is None
            assert told_in_the_end(forks, tmp_path)["imported_by"] != first


def told_in_the_end(forks: ForkserverLauncher, folder: Path) -> dict[str, Any]:
    """A fork's report, once there are forks again; programs start meanwhile."""

    def of_a_fork() -> dict[str, Any] | None:
        assert forks.ready(time.monotonic()), "nobody waits for a second zygote"
        with started(forks, "ends", folder) as process:
            line = read_line(process)
        return None if line == "a program\n" else json.loads(line)

    report: dict[str, Any] = wait_for(of_a_fork)
    return report


def test_a_zygote_has_what_libraries_read_as_they_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """How long idle threads spin is read when torch is imported: in a fork it would be too late."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    machine = MachineSpec(name="m", address=f"unix:{tmp_path}/m", folder=str(tmp_path), models=[], device="cpu")
    with contextlib.closing(open_launcher(machine)) as forks:
        assert isinstance(forks, ForkserverLauncher)
        forks.ready(time.monotonic())
        environment = wait_for(lambda: psutil.Process(forks.zygote).environ())
    assert waiting_environment({}).items() <= environment.items()
    assert "glibc.malloc.hugetlb=1" in environment["GLIBC_TUNABLES"]


def test_a_zygote_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with open_forks("tests.support.zygote_spy") as forks:
        warm(forks)
        assert forks.zygote is not None
        os.kill(forks.zygote, signal.SIGSTOP)
        with started(forks, "ends", tmp_path) as program:
            assert read_line(program) == "a program\n"
        assert forks.zygote is None


def test_replicas_are_not_started_while_the_zygote_imports(tmp_path: Path) -> None:
    with open_forks("tests.support.zygote_spy") as forks:
        assert not forks.ready(time.monotonic())
        assert forks.ready(time.monotonic() + 61)
        with started(forks, "ends", tmp_path) as program:
            assert read_line(program) == "a program\n"


def test_a_module_that_is_missing_is_left_to_the_replica_to_tell(tmp_path: Path) -> None:
    with open_forks("engine.no_such_module", "tests.support.zygote_spy") as forks:
        warm(forks)
        with started(forks, "ends", tmp_path) as process:
            told(process)


OWNER = """
import signal, sys, time
from pathlib import Path
from engine.host.supervisor import SubprocessLauncher
from engine.host.forkserver import ForkserverLauncher
from tests.engine.host.test_forkserver import spec_of, told, warm
forks = ForkserverLauncher(["tests.support.zygote_spy"], SubprocessLauncher(lambda spec: []), time.monotonic)
warm(forks)
print(forks.zygote, told(forks.start(spec_of("stays", Path(sys.argv[1])), {}))["pid"], flush=True)
signal.alarm(60)
signal.pause()
"""


def test_all_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    descendants = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(descendants) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert psutil.wait_procs(descendants, timeout=30)[1] == []


PROGRAM_WITH_SPY = """
import sys
import tests.support.imports_spy
from engine.replica import server
sys.exit(server.main(sys.argv[1:]))
"""
# What takes long to import, and what no replica uses before its first token.
UNNEEDED = {
    *("torch._dynamo", "torch._inductor", "torch.onnx", "torch.fx.experimental.symbolic_shapes", "sympy", "networkx"),
    *("triton", "engine.execution.open_gpu", "opentelemetry", "requests", "httpx", "rich", "cyclopts", "starlette"),
    *("uvicorn", "cryptography", "jsonschema", "jinja2", "tokenizers", "transformers", "huggingface_hub", "redis"),
    *("gateway", "tenants"),
}


def serve_until_told(process: ReplicaProcess, spec: ReplicaSpec) -> dict[str, Any]:
    """Says what the replica's spy tells at its end, once it has served."""
    with contextlib.closing(Heartbeat.open(spec.pulse)) as pulse:
        wait_for(lambda: process.poll() is not None or pulse.read()[0] is ReplicaPhase.IDLE)
    assert process.poll() is None
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.connect(spec.address.removeprefix("unix:"))
        hello = next(FrameReader().feed(gateway.recv(1 << 16)))
        assert isinstance(hello, Hello)
        assert hello.pid == process.pid
    process.terminate()
    while not (line := read_line(process)).startswith('{"modules"'):
        pass
    assert process.wait() == 0
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_forked_replica_serves_with_no_more_imported_than_it_needs(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    modules = zygote_modules(MachineSpec(name="m", address="", folder="", models=[], device=device))
    with open_forks(*modules, "tests.support.imports_spy") as forks:
        warm(forks)
        Heartbeat.create(tmp_path / "pulse").close()
        with started(forks, "ends", tmp_path) as process:
            found = serve_until_told(process, spec_of("ends", tmp_path))
    on_gpu = {"triton", "engine.execution.open_gpu"} if device == "cuda" else set()
    assert UNNEEDED & set(found["modules"]) == on_gpu
    assert found["collects"]
    assert found["frozen"] > 100_000


def test_a_replica_without_a_zygote_serves_with_no_more_imported_than_it_needs(tmp_path: Path) -> None:
    def command(spec: ReplicaSpec) -> list[str]:
        return [sys.executable, "-c", PROGRAM_WITH_SPY, msgspec.json.encode(spec).decode()]

    spec = spec_of("ends", tmp_path)
    Heartbeat.create(tmp_path / "pulse").close()
    process = SubprocessLauncher(command).start(spec, {"PYTHONPATH": str(ROOT)})
    try:
        found = serve_until_told(process, spec)
    finally:
        process.kill()
        process.wait()
        process.close()
    assert not UNNEEDED & set(found["modules"])
    assert found["collects"]
    assert found["frozen"] > 100_000
