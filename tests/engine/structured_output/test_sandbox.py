"""engine/structured_output/sandbox.py: what would take too long or too much ends its fork, and nothing else."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from engine.structured_output.sandbox import GrammarSandbox, SandboxGone
from tests.engine.structured_output.texts import EMBER

ENDLESS = 'start: %json {"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 103}]}'
LARGE = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "a"'


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarSandbox]:
    opened = GrammarSandbox(EMBER, time_s=0.2)
    yield opened
    opened.end()


def test_it_says_what_is_wrong_and_goes_on(trial: GrammarSandbox) -> None:
    assert trial.check('start: "a"') == ""
    assert "unknown name" in trial.check("start: nobody")
    assert "unknown special token" in trial.check("start: <|nobody|>")
    assert trial.check('start: <|tool|> "a"') == ""


def test_what_takes_too_long_is_ended_by_the_time_of_its_processor(trial: GrammarSandbox) -> None:
    assert trial.check(ENDLESS) == "it takes more than 0.2 s to compile"
    assert trial.check('start: "a"') == ""


def test_what_takes_too_much_memory_is_ended() -> None:
    trial = GrammarSandbox(EMBER, time_s=5.0, memory_bytes=24 << 20)
    assert trial.check(LARGE) == "it takes more than 24 MB to compile"
    assert trial.check('start: "a"') == ""
    trial.end()


def test_what_is_nested_deeply_harms_nobody(trial: GrammarSandbox) -> None:
    for opening, closing in (("(", ")"), ("[", "]")):
        assert trial.check(f'start: {opening * 20_000}"a"{closing * 20_000}')
    assert trial.check(f"start: /{'(' * 20_000}a{')' * 20_000}/")
    assert trial.check('start: "a"') == ""


def test_waiting_for_a_sandbox_that_is_gone_raises() -> None:
    trial = GrammarSandbox(EMBER)
    assert trial.check('start: "a"') == ""
    time.sleep(0.2)  # until it has the next fork
    os.kill(trial._process.pid, signal.SIGKILL)
    trial._process.wait()
    with pytest.raises(SandboxGone):
        trial.check('start: "a"')
    trial.end()
