"""engine/process/supervised.py: pauses between attempts, and children that end with their parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.process.supervised import Backoff, start_child

ROOT = Path(__file__).parent.parent.parent.parent
OWNER = """
import signal, sys
from engine.process.supervised import start_child
command = [sys.executable, "-c", "import signal; print('alive', flush=True); signal.alarm(60); signal.pause()"]
print(start_child(command, death=signal.Signals[sys.argv[1]]).pid, flush=True)
signal.alarm(60)
signal.pause()
"""


def test_a_pause_doubles_with_each_failure_in_a_row_up_to_its_limit() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.fail() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5
    backoff.reset()
    assert (backoff.failures, backoff.fail()) == (0, 0.5)


def test_a_pause_stays_bounded_however_many_failures_there_are() -> None:
    backoff = Backoff(0.5, 30.0)
    assert {backoff.fail() for _ in range(5000)} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0}


def test_a_child_has_its_parents_environment_and_its_own_and_writes_to_one_place() -> None:
    source = "import os, sys; print(os.environ['A'], os.environ['PATH']); print('error', file=sys.stderr)"
    with start_child([sys.executable, "-c", source], output=subprocess.PIPE, environment={"A": "b"}) as child:
        assert child.stdout is not None
        lines = child.stdout.read().decode().splitlines()
    assert sorted(lines) == sorted([f"b {os.environ['PATH']}", "error"])


def test_a_child_reads_nothing_and_may_have_a_group_of_its_own() -> None:
    source = "import os, sys; sys.exit(bool(sys.stdin.read()) or os.getpgrp() != os.getpid())"
    assert start_child([sys.executable, "-c", source], own_group=True).wait() == 0
    assert start_child([sys.executable, "-c", source]).wait() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parents")
@pytest.mark.parametrize("death", ["SIGKILL", "SIGTERM"])
def test_a_child_ends_with_a_parent_that_is_killed(death: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OWNER, death]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        lines = {owner.stdout.readline(), owner.stdout.readline()}
        assert b"alive\n" in lines
        owner.send_signal(signal.SIGKILL)
        assert owner.stdout.read() == b""  # the end of the pipe that the child held too
