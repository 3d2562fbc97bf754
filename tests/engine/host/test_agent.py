import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.host.supervisor import SupervisionTimeouts
from engine.log import LOG_FORMAT_VARIABLE
from engine.process.heartbeat import ReplicaPhase
from engine.protocol.frames import DrainMachine, encode_frame
from engine.protocol.reports import MEMORY_REPORT_SUFFIX
from engine.protocol.types import Residency
from tests.support.machine import Host, gone, hosting, short_folder
from tests.support.waiting import wait_for


@pytest.fixture
def short() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def test_a_replica_is_reported_when_it_serves(short: Path) -> None:
    with hosting(short, {"b": "serve", "a": "slow-load"}) as host:
        host.until_serving("b")
        host.until("a", lambda state: state.boot == 1)
        assert host.fleet()["a"].residency is Residency.DISK
        assert host.fleet()["a"].problem == "loading"
        state = host.until_serving("a")
        assert state.problem == ""
        assert state.boot == 1
        probe = socket.socket(socket.AF_UNIX)
        probe.connect(state.address.removeprefix("unix:"))
        probe.close()


def test_a_crash_is_reported_within_half_a_second_and_repaired(short: Path) -> None:
    """The quickest of three: the host of the tests may be busy."""
    with hosting(short, {"a": "serve"}) as host:
        noticed_s = []
        for boot in range(1, 4):
            host.until_serving("a", boot)
            began = time.monotonic()
            os.kill(host.pid("a", boot), signal.SIGKILL)
            lost = host.until("a", lambda state: state.residency is Residency.DISK)
            noticed_s.append(time.monotonic() - began)
            assert "signal 9" in lost.problem or lost.boot > boot
        assert host.until_serving("a", boot=4).boot == 4
        assert all(gone(host.pid("a", boot)) for boot in range(1, 4))
        assert min(noticed_s) < 0.5


def test_a_hung_replica_is_killed_and_started_again(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        host.behave("a", "hang")
        began = time.monotonic()
        lost = host.until("a", lambda state: state.residency is Residency.DISK)
        assert time.monotonic() - began > 1.9
        assert "silent" in lost.problem or lost.boot == 2
        host.behave("a", "serve")
        host.until_serving("a", boot=2)
        assert gone(host.pid("a", 1))


def test_a_stopped_replica_is_killed_too(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        os.kill(host.pid("a", 1), signal.SIGSTOP)
        host.until_serving("a", boot=2)
        assert gone(host.pid("a", 1))


def test_loading_may_be_silent_for_longer_than_a_step(short: Path) -> None:
    with hosting(short, {"a": "silent-load"}, step_s=1.0) as host:
        assert host.until_serving("a").boot == 1


def test_a_load_that_hangs_is_noticed_as_well(short: Path) -> None:
    with hosting(short, {"a": "silent-load"}, loading_s=0.5) as host:
        host.until("a", lambda state: state.boot >= 2)
        assert '"phase": "LOADING"' in host.log


def test_a_machine_that_was_itself_stopped_blames_nobody(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        replica = host.pid("a", 1)
        for pid in (replica, host.machine.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.5)
        for pid in (host.machine.pid, replica):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.8)
        assert host.fleet()["a"].boot == 1
        assert "replica_hung" not in host.log


def test_a_gateway_of_another_protocol_is_refused_by_name_and_others_are_served(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        body = msgspec.msgpack.encode(["tomorrow", 1])
        with host.gateway() as stranger:
            stranger.sendall(len(body).to_bytes(4, "big") + body)
            wait_for(lambda: host.events("gateway_lost"))
        (lost,) = host.events("gateway_lost")
        assert "'tomorrow' frame, which protocol 3 does not have: install the same hearth" in lost["reason"]
        assert host.fleet()["a"].residency is Residency.DEVICE


def test_a_log_for_people_is_text_and_progress_is_still_read(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "text")
    with hosting(short, {"a": "half-loaded"}) as host:
        host.until("a", lambda state: state.problem == "loading 43 %")
        wait_for(lambda: "loading percent=43" in host.log)
        (line,) = [line for line in host.log.splitlines() if "percent=43" in line]
        assert re.fullmatch(r"\[a\] \d\d:\d\d:\d\d loading percent=43", line)
        assert "{" not in host.log


def test_a_replica_that_cannot_start_is_tried_with_growing_pauses_and_says_why(short: Path) -> None:
    with hosting(short, {"a": "crash", "b": "serve"}) as host:
        problem = host.until("a", lambda state: state.boot >= 4 and "ended" in state.problem).problem
        assert "status 3" in problem
        assert "no such weights: shard 7" in problem
        events = [json.loads(line) for line in host.log.splitlines() if line.startswith("{")]
        pauses = [event["again_after_s"] for event in events if event["event"] == "replica_ended"]
        assert pauses[:4] == [0.1, 0.2, 0.4, 0.4]
        host.until_serving("b")
        host.behave("a", "serve")
        host.until_serving("a", boot=5)


def test_a_model_whose_folder_is_missing_waits_for_it_without_a_process_and_says_so_once(short: Path) -> None:
    with hosting(short, {"m": "serve", "other": "serve"}) as host:
        host.until_serving("m")
        (short / "m").rename(short / "away")
        os.kill(int((short / "away" / "pid-1").read_text()), signal.SIGKILL)
        waiting = host.until("m", lambda state: state.residency is Residency.DISK and state.ready_ms < 0)
        assert waiting.problem == f"its folder {short}/m is missing: it starts once that is there"
        os.kill(host.pid("other", 1), signal.SIGKILL)
        host.until_serving("other", boot=2)  # as long as "m" would have taken
        assert host.fleet()["m"].boot == 1
        (short / "away").rename(short / "m")
        assert host.until_serving("m", boot=2).boot == 2
        assert len(host.events("model_folder_missing")) == len(host.events("model_folder_found")) == 1


def test_a_model_whose_folder_was_never_there_starts_once_it_is(short: Path) -> None:
    with hosting(short, {"m": "serve"}) as host:
        never = host.model("late")
        (short / "late").rename(short / "away")
        host.ask(host.spec.models[0], never)
        assert host.until("late", lambda state: "is missing" in state.problem).boot == 0
        (short / "away").rename(short / "late")
        assert host.until_serving("late").boot == 1


def test_a_replica_whose_program_cannot_be_started_leaves_the_others_alone(short: Path) -> None:
    with hosting(short, {"a": "serve", "b": "serve"}) as host:
        host.until_serving("a")
        host.until_serving("b")
        host.behave("a", "no-program")
        os.kill(host.pid("a", 1), signal.SIGKILL)
        lost = host.until("a", lambda state: "no-such-program" in state.problem)
        assert "tried again after" in lost.problem
        host.behave("a", "serve")
        host.until_serving("a", boot=2)
        assert host.fleet()["b"].boot == 1


def test_a_replica_that_served_long_enough_starts_again_without_back_off_though_it_was_never_idle(short: Path) -> None:
    with hosting(short, {"a": "busy"}, stable_s=0.5) as host:
        for boot in (1, 2, 3):
            host.until_serving("a", boot)
            time.sleep(0.8)
            os.kill(host.pid("a", boot), signal.SIGKILL)
        host.until_serving("a", boot=4)
        events = [json.loads(line) for line in host.log.splitlines() if line.startswith("{")]
        assert [event["again_after_s"] for event in events if event["event"] == "replica_ended"] == [0.1, 0.1, 0.1]
        assert [event["boot"] for event in events if event["event"] == "replica_ready"] == [1, 2, 3, 4]


def test_sigterm_ends_everything_and_leaves_no_socket(short: Path) -> None:
    with hosting(short, {"a": "serve", "b": "serve"}) as host:
        addresses = [host.until_serving(name).address for name in "ab"]
        pids = [host.pid(name, 1) for name in "ab"]
        host.machine.terminate()
        assert host.machine.wait(30) == 0
        assert all(gone(pid) for pid in pids)
        assert not any(Path(address.removeprefix("unix:")).exists() for address in [*addresses, host.spec.address])


def test_a_replica_that_does_not_end_is_killed_at_the_deadline(short: Path) -> None:
    with hosting(short, {"a": "stubborn"}) as host:
        host.until_serving("a")
        pid, began = host.pid("a", 1), time.monotonic()
        host.machine.terminate()
        assert host.machine.wait(60) == 0
        assert time.monotonic() - began > 0.9
        assert gone(pid)


def test_a_second_sigterm_does_not_wait(short: Path) -> None:
    with hosting(short, {"a": "stubborn"}, drain_s=60.0) as host:
        host.until_serving("a")
        host.machine.terminate()
        wait_for(lambda: "machine_draining" in host.log)
        host.machine.terminate()
        assert host.machine.wait(30) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux'")
def test_replicas_die_with_a_killed_machine_and_the_next_one_takes_its_place(short: Path) -> None:
    with hosting(short, {"a": "stubborn"}) as host:
        host.until_serving("a")
        pid = host.pid("a", 1)
        host.machine.kill()
        host.machine.wait()
        wait_for(lambda: gone(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)
        assert Path(host.spec.address.removeprefix("unix:")).exists(), "the stale socket is the point of this test"
        host.seen.clear()
        host._socket = None
        host.machine = host.start()
        host.until_serving("a")


def test_a_second_machine_in_the_same_folder_is_refused(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        other = host.start()
        assert other.wait(20) == 1
        assert "another machine runs in" in host.log
        assert host.fleet()["a"].residency is Residency.DEVICE


def test_a_gateway_that_sends_rubbish_is_dropped_and_others_are_not(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        rude = socket.socket(socket.AF_UNIX)
        rude.connect(f"{short}/m.sock")
        rude.settimeout(5)
        rude.sendall(b"\xff" * 64)
        while rude.recv(1 << 16):
            pass
        os.kill(host.pid("a", 1), signal.SIGKILL)
        host.until_serving("a", boot=2)


def test_a_drain_that_cannot_be_noted_ends_no_replica(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        (short / "run" / "drained").mkdir()  # in the way of what is to be removed
        with host.gateway() as gateway:
            gateway.sendall(encode_frame(DrainMachine(drained=False)))
            wait_for(lambda: host.events("machine_not_drained"))
        assert host.fleet()["a"].residency is Residency.DEVICE


def test_a_replicas_lines_reach_the_log_whole_and_bounded(short: Path) -> None:
    with hosting(short, {"a": "chatty"}) as host:
        host.until_serving("a")
        wait_for(lambda: '"text": "xyyy' in host.log)
        assert '"text": "half a line", "process": "a"}\n' in host.log
        assert max(map(len, host.log.splitlines())) < 5000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_log_that_cannot_be_written_ends_nothing(short: Path) -> None:
    with hosting(short, {"a": "serve"}, log_path="/dev/full") as host:
        for boot in (1, 2):
            host.until_serving("a", boot)
            os.kill(host.pid("a", boot), signal.SIGKILL)
        host.until_serving("a", boot=3)
        host.machine.terminate()
        assert host.machine.wait(30) == 0


def environment(host: Host, name: str) -> dict[str, str | None]:
    host.until_serving(name)
    seen: dict[str, str | None] = json.loads((host.folder / name / "environment").read_text())
    return seen


def test_replicas_get_one_gpu_each_spread_over_all_and_share_a_kept_cache_of_kernels(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with hosting(short, {"a": "serve", "b": "serve", "c": "serve"}) as host:
        seen = [environment(host, name) for name in "abc"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen[:2]] == ["3", "5"]
    assert seen[2]["CUDA_VISIBLE_DEVICES"] in ("3", "5")
    assert {each["TRITON_CACHE_DIR"] for each in seen} == {str(short / "run" / "kernels")}
    assert (short / "run" / "kernels").is_dir()


def test_a_model_of_two_ranks_gets_two_gpus_and_one_of_three_is_refused_by_name(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with hosting(short, {"a": "serve"}) as host:
        host.ask(host.model("a"), host.model("p", gpus=2), host.model("w", gpus=3), host.model("auto", gpus=0))
        assert environment(host, "p")["CUDA_VISIBLE_DEVICES"] == "3,5"
        assert environment(host, "auto")["CUDA_VISIBLE_DEVICES"] in ("3", "5")
        assert (host.started_spec("p").model.gpus, host.started_spec("auto").model.gpus) == (2, 1)
        assert host.until("p", lambda state: state.devices == [0, 1]).device == 0
        wide = host.until("w", lambda state: state.problem.startswith("w needs 3 GPUs"))
        assert (wide.ready_ms, wide.boot) == (-1, 0)


def test_one_gpu_may_be_named_and_the_users_cache_is_left_alone(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/their/own")
    with hosting(short, {"a": "serve", "b": "serve"}, device="cuda:1") as host:
        for name in "ab":
            assert environment(host, name) == {
                "CUDA_VISIBLE_DEVICES": "5",
                "TRITON_CACHE_DIR": "/their/own",
                "device": "cuda",
            }


def test_a_gpu_that_is_not_there_is_refused_in_words(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with hosting(short, {"a": "serve"}, device="cuda:2") as host:
        assert host.machine.wait(20) == 1
        assert "there is no cuda:2: this host has 2 GPUs" in host.log


def test_a_cache_of_kernels_that_cannot_be_written_is_replaced_for_this_run_and_said(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (short / "run").mkdir()
    (short / "run" / "kernels").write_text("a file is in the way")
    with hosting(short, {"a": "serve"}) as host:
        instead = Path(environment(host, "a")["TRITON_CACHE_DIR"] or "")
        assert instead.is_dir()
        assert host.log.count("kernel_cache_not_kept") == 1
        host.machine.terminate()
        host.machine.wait(30)
        assert not instead.exists()


def test_on_a_cpu_nothing_is_said_of_gpus(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with hosting(short, {"a": "serve"}, device="cpu") as host:
        assert environment(host, "a") == {"CUDA_VISIBLE_DEVICES": None, "TRITON_CACHE_DIR": None, "device": "cpu"}


def test_how_far_a_load_is_reaches_the_gateways(short: Path) -> None:
    with hosting(short, {"a": "half-loaded"}) as host:
        state = host.until("a", lambda state: "%" in state.problem)
        assert (state.problem, state.residency) == ("loading 43 %", Residency.DISK)


def test_what_a_replica_said_of_its_memory_goes_with_it(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        (told,) = (short / "run").glob(f"*{MEMORY_REPORT_SUFFIX}")
        host.behave("a", "no-program")
        os.kill(host.pid("a", 1), signal.SIGKILL)
        wait_for(lambda: not told.exists())


def test_a_wrong_spec_is_refused_in_words() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "engine.host.agent", '{"name": "x", "colour": 1}'], capture_output=True, text=True
    )
    assert asked.returncode == 1
    assert "colour" in asked.stderr or "required" in asked.stderr


def test_every_phase_has_a_limit() -> None:
    timeouts = SupervisionTimeouts()
    assert all(0 < timeouts.for_phase(phase) <= 300 for phase in ReplicaPhase)
    assert timeouts.for_phase(ReplicaPhase.STEP) + timeouts.look_s < 5.0
