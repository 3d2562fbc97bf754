"""For a zygote to import: what it forks then tells about itself in a line of JSON, and does what its model's name
says, instead of being a replica."""

import json
import os
import signal
import time
from typing import Any

import msgspec

from engine.protocol.specs import ReplicaSpec
from engine.replica import server

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_imported_by = os.getpid()


def _told(environment: str) -> dict[str, Any]:
    files = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]}
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "imported_by": _imported_by,
        "environment": os.environ.get(environment),
        "files": files,
        "blocked": [number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "handled": [signal.getsignal(number) is not signal.SIG_IGN for number in _NUMBERS],
    }


def main(argv: list[str]) -> int:
    name = msgspec.json.decode(argv[0], type=ReplicaSpec).model.name
    print(json.dumps(_told("GIVEN_BY_THE_TEST")), flush=True)
    if name == "stays":
        time.sleep(60)
    if name == "leaves an orphan" and os.fork() == 0:
        time.sleep(0.2)
        os._exit(0)
    return 3


server.main = main
