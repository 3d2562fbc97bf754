"""Stub replicas in a process of their own, of whose sequences a few in a hundred fail or take their connection along.

python -m tests.end_to_end.flaky_fleet '{"folder": …, "replicas": 2, "step_s": 0.03, "flaky": true}'
"""

import asyncio
import contextlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any, Final

import uvloop

from engine.protocol import frames
from engine.protocol.types import FinishReason
from tests.support.stub_replica import Behaviour, Running, StubConnection, StubFleet, StubReplica

FAILING: Final = 350  # of 10,000 sequences end with an error of the replica's
CUTTING: Final = 5  # of 10,000 take the gateway's connection along, and all that runs on it: as many again fail


class FlakyConnection(StubConnection):
    """Which sequences fail, and at which token, depends on what was asked, and when."""

    def _next(self, running: Running, behaviour: Behaviour) -> tuple[list[int], frames.SequenceFinished | None]:
        draw = zlib.crc32(b"%d %d" % (running.seed, running.id)) % 10_000
        if running.emitted >= running.submit.max_tokens // 2:
            if draw < CUTTING:
                self.close()
            elif draw < CUTTING + FAILING:
                return [], frames.SequenceFinished(
                    running.id, FinishReason.ERROR, running.emitted, "it was drawn to fail"
                )
        return super()._next(running, behaviour)


class FlakyReplica(StubReplica):
    async def serve(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(lambda: FlakyConnection(self), str(self.path))


async def main(folder: Path, options: dict[str, Any]) -> None:
    """Serves until killed; says `ready` once it does."""
    fleet = StubFleet(folder)
    fleet.behaviour = Behaviour(step_s=options["step_s"])
    paths = [folder / f"replica-{n}.sock" for n in range(options["replicas"])]
    replica = FlakyReplica if options["flaky"] else StubReplica
    fleet.replicas = [replica(path, fleet.behaviour) for path in paths]
    async with fleet.serving():
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main(Path(asked["folder"]), asked))
