"""What a load costs beside its time: the cores that gateway and replicas on this host use, and what the gateway adds
to the time to first token."""

import array
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Final

import psutil

from engine import wire
from gateway.bench.client import Measured, Target, request
from gateway.bench.load import Load

_KINDS: Final = {"gateway": ("gateway.cli", "gateway"), "replica": ("engine.replica",)}
_PAIR_EVERY_S: Final = 0.2
_WORDS: Final = 64


class Cores:
    """CPU seconds of the gateway and replica processes, those below `pid` or all on this host, since it was made."""

    def __init__(self, pid: int | None) -> None:
        below = psutil.process_iter() if pid is None else psutil.Process(pid).children(recursive=True)
        self._processes = [(kind, process) for process in below if (kind := _kind(process))]
        self._began_s, self._before = time.monotonic(), self._used_s()

    def used(self) -> dict[str, float]:
        """Cores by kind, on average until now; no entry for a kind that does not run here."""
        seconds = time.monotonic() - self._began_s
        return {kind: round((used - self._before[kind]) / seconds, 3) for kind, used in self._used_s().items()}

    def _used_s(self) -> dict[str, float]:
        used = dict.fromkeys((kind for kind, _ in self._processes), 0.0)
        for kind, process in self._processes:
            times = process.cpu_times()
            used[kind] += times.user + times.system
        return used


def _kind(process: psutil.Process) -> str | None:
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    return next((kind for kind, names in _KINDS.items() if all(name in words for name in names)), None)


@dataclass(slots=True)
class Pairs:
    """The same request to the gateway and past it, to the replica's own socket, both at one moment, again and again.

    Under a load the difference holds what the gateway does before and after, and the step it misses by that.
    """

    target: Target
    vocabulary: int
    through_ms: list[float] = field(default_factory=list)
    past_ms: list[float] = field(default_factory=list)

    def added_ms(self) -> float | None:
        """On average of all pairs; None without any."""
        pairs = zip(self.through_ms, self.past_ms, strict=True)
        return statistics.fmean(through - past for through, past in pairs) if self.past_ms else None

    async def run(self, machine: str) -> None:
        """Until cancelled."""
        reader, writer = await _connect(await _replica(machine))
        try:
            frames, draw, number = wire.FrameReader(), random.Random(0), 0
            while True:
                number += 1
                ids = array.array("I", (draw.randrange(self.vocabulary) for _ in range(_WORDS)))
                submit = wire.Submit(number, ids.tobytes(), wire.Scope(), wire.Sampling(), 1)
                through, past_ms = await asyncio.gather(
                    self._through(number), _first_ms(reader, writer, frames, submit)
                )
                self.through_ms.append(through)
                self.past_ms.append(past_ms)
                await asyncio.sleep(_PAIR_EVERY_S)
        finally:
            writer.close()

    async def _through(self, number: int) -> float:
        load = Load(1, 1, words=_WORDS, max_tokens=1, vocabulary=self.vocabulary, seed=-1)
        measured = Measured()
        await request(self.target, load.body(number), measured)
        return measured.first_ms[0]


async def _first_ms(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: wire.FrameReader, submit: wire.Submit
) -> float:
    began = time.perf_counter()
    writer.write(wire.encode(submit))
    while received := await reader.read(1 << 16):
        for frame in frames.feed(received):
            if isinstance(frame, wire.Progress) and submit.id in frame.ids:
                return (time.perf_counter() - began) * 1e3
    raise EOFError("the replica closed its socket")


async def _replica(machine: str) -> str:
    """The address of a replica that the machine names."""
    reader, writer = await _connect(machine)
    try:
        frames = wire.FrameReader()
        while received := await reader.read(1 << 16):
            for frame in frames.feed(received):
                if isinstance(frame, wire.Fleet):
                    return frame.replicas[0].address
        raise EOFError("the machine closed its socket")
    finally:
        writer.close()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = wire.parse_address(address)
    if isinstance(where, str):
        return await asyncio.open_unix_connection(where)
    return await asyncio.open_connection(*where)
