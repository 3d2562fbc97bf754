"""A relay before a real replica, which cuts the gateway's connection once enough tokens have passed: what the gateway
sees when a replica's host is gone. And real replicas of the built-in model as processes."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.protocol import frames
from engine.protocol.cache_frames import HandOverFailed
from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import FinishReason
from tests.support.stub_replica import Behaviour, StubReplica
from tests.support.waiting import wait_for

EMBER_FOLDER = Path(__file__).parents[2] / "engine" / "builtin_model"
PARTS_PROGRAM = Path(__file__).with_name("parts_replica.py")
START_S = 90.0


class CutReplica(StubReplica):
    """`cut_in`: after so many more tokens the connection is cut, once; None: never. `on_cut` is called then; `submits`
    are what passed. `drain_in`: after so many more it says that it drains, once; `moved` sequences left it then."""

    def __init__(self, path: Path, real: str) -> None:
        super().__init__(path, Behaviour())
        self.cut_in: int | None = None
        self.on_cut: Callable[[], None] = lambda: None
        self.drain_in: int | None = None
        self.moved = self.stayed = 0
        self._real = real.removeprefix("unix:")
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._relay, str(self.path))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        real_reader, real_writer = await asyncio.open_unix_connection(self._real)
        back = asyncio.create_task(self._pass_orders(reader, real_writer))
        try:
            await self._pass_tokens(real_reader, writer)
        finally:
            back.cancel()
            for each in (writer, real_writer):
                each.close()

    async def _pass_orders(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known = frames.FrameReader()
        while received := await reader.read(1 << 16):
            self.submits.extend(frame for frame in known.feed(received) if isinstance(frame, frames.Submit))
            writer.write(received)
        writer.close()

    async def _pass_tokens(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known = frames.FrameReader()
        with contextlib.suppress(ConnectionError):
            while received := await reader.read(1 << 16):
                for frame in known.feed(received):
                    writer.write(frames.encode_frame(frame))
                    if isinstance(frame, HandOverFailed):
                        self.stayed += 1
                    if not isinstance(frame, frames.StepOutputs):
                        continue
                    self.moved += sum(each.reason is FinishReason.MOVED for each in frame.finished)
                    if self.cut_in is not None:
                        self.cut_in -= sum(frame.counts)
                    if self.drain_in is not None:
                        self.drain_in -= sum(frame.counts)
                        if self.drain_in <= 0:
                            self.drain_in = None
                            writer.write(frames.encode_frame(frames.ReplicaLoad(1, 0, 0, 0, 0, 0, draining=True)))
                if self.cut_in is not None and self.cut_in <= 0:
                    self.cut_in, self.deaths = None, self.deaths + 1
                    await writer.drain()
                    self.on_cut()
                    return


@contextlib.contextmanager
def real_replicas(
    folder: Path, count: int, ranks: Sequence[int] = (), parts: int | None = None, **model: Any
) -> Iterator[list[str]]:
    """Addresses of replicas of the built-in model, on the CPU: of one rank each, or of so many `ranks`. They compute
    sums in so many `parts`, None: each in as many as it has ranks."""
    specs = [
        ReplicaSpec(
            model=ModelSpec(name="@cf/test/stub", folder=str(EMBER_FOLDER), gpus=ranks[index] if ranks else 1, **model),
            address=f"unix:{folder / f'real-{index}.sock'}",
            pulse=str(folder / f"pulse-{index}"),
            boot=1,
            device="cpu",
            threads=1,
        )
        for index in range(count)
    ]
    with contextlib.ExitStack() as ends:
        for index, spec in enumerate(specs):
            log = ends.enter_context((folder / f"real-{index}.log").open("w"))
            program = [str(PARTS_PROGRAM)] if parts else ["-m", "engine.replica.server"]
            more = [str(parts)] if parts else []
            command = [sys.executable, *program, msgspec.json.encode(spec).decode(), *more]
            process = subprocess.Popen(command, stderr=log)
            ends.callback(process.wait, 30)
            ends.callback(process.kill)
        for spec in specs:
            path = Path(spec.address.removeprefix("unix:"))
            wait_for(path.exists, START_S, f"{path} is there")
        yield [spec.address for spec in specs]
