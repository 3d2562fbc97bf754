"""What tests of all packages share: a real Redis, the interpreter where there is no GPU, and which tests are slow."""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import VOLATILE, RedisServer

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported
for _number in (signal.SIGINT, signal.SIGHUP):  # a run in the background ignores them, and so would all that it starts
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

ROOT = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
SLOW_S = 1.0
SLOW_TIMEOUT_S = 300  # of a slow test, or
BUSY = 40  # times what it took when it was measured: that was on quiet cores
UNTIL_S = float(os.environ.get("HEARTH_TESTS_UNTIL", "inf"))  # of the epoch: slow tests are left out from then on
SLOW_FOLDERS = ("tests/end_to_end", "tests/conformance")  # whole servers, which start once and serve all their tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--measure", action="store_true", help="write what each test took into tests/durations.json, for the next runs"
    )


def measured_s() -> dict[str, float]:
    """The seconds of tests that took half of one or more, by their names."""
    seconds: dict[str, float] = json.loads(DURATIONS.read_text())
    return seconds


def is_slow(name: str, seconds: float) -> bool:
    """Whether it took SLOW_S and more when it was measured, or needs a server of its own."""
    return seconds >= SLOW_S or name.startswith(SLOW_FOLDERS)


def pytest_configure(config: pytest.Config) -> None:
    """Lets each worker begin to import the tests of a folder at another place: a clean clone has nothing compiled yet,
    and what one worker has compiled, the others find. That is a third of what collecting costs them."""
    worker = getattr(config, "workerinput", None)
    if worker is None or not all(Path(name).is_dir() for name in config.args):
        return
    ignored = {Path(name).resolve() for name in config.getoption("ignore") or ()}
    paths = [path for name in config.args for path in sorted(Path(name).rglob("test_*.py"))]
    paths = [path for path in paths if ignored.isdisjoint(path.resolve().parents)]
    first = len(paths) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args[:] = map(str, paths[first:] + paths[:first])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)  # the same in each worker
    seconds = measured_s()
    for item in items:
        took = seconds.get(item.nodeid, 0.0)
        if is_slow(item.nodeid, took):
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(max(SLOW_TIMEOUT_S, BUSY * took)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL_S and item.get_closest_marker("slow"):
        pytest.skip("no time is left: HEARTH_TESTS_UNTIL")


def pytest_collection_finish() -> None:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support.interpreter import spare_repetitions

        spare_repetitions()
    gc.collect()
    gc.freeze()  # thousands of tests and what they import stay: collections need not go through them again


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("--measure"):
        return
    seconds = measured_s()
    measured: dict[str, float] = {}
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            measured[report.nodeid] = measured.get(report.nodeid, 0.0) + report.duration
    seconds = {name: took for name, took in seconds.items() if (ROOT / name.split("::")[0]).exists()} | measured
    lines = {name: round(took, 1) for name, took in sorted(seconds.items()) if took >= 0.5}
    DURATIONS.write_text(json.dumps(lines, indent=0, ensure_ascii=False) + "\n")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio alone, which is what serves: trio comes along with what drives the browser."""
    return "asyncio"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this test session on a free port of 127.0.0.1, without persistence; stopped at the end."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), VOLATILE)
    server.start()
    try:
        yield server.url
    finally:
        server.close()
