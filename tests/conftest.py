"""What tests of several rooms share: a real Redis, and Triton's interpreter where there is no GPU."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import VOLATILE, RedisServer

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported
for _number in (signal.SIGINT, signal.SIGHUP):  # a run in the background ignores them, and so would all that it starts
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this test session on a free port of 127.0.0.1, without persistence; stopped at the end."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), VOLATILE)
    server.start()
    try:
        yield server.url
    finally:
        server.close()
