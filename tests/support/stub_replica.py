"""A replica without a model: real frames over a real unix socket, deterministic tokens, at any pace. And its machine.

Run as a process (`python stub_replica.py '{"folder": …}'`) or inside a test's loop with `StubReplica`.

What a sequence answers: token i of choice c is `TEXT[(sum(prompt ids) + c + i) % len(TEXT)]`, until max_tokens.
"""

import asyncio
import contextlib
import json
import sys
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from engine.protocol import frames
from engine.protocol.cache_frames import HeldPrefixes, RaiseEpochs, RouteKey
from engine.protocol.types import FinishReason, RejectReason, Residency

MODEL = "@cf/test/stub"
WORDS = list(range(1000, 1064))  # ids of ordinary text in the tests' tokenizer


@dataclass
class Behaviour:
    """What a test changes while it runs. Times in seconds."""

    context_tokens: int = 8192
    image_tokens: int = 0
    newest_protocol: int = frames.PROTOCOL_VERSION
    raises_epochs: bool = True
    names_prefixes: bool = True
    polled: bool = False
    region: str = ""
    vocabulary: int = 6000
    words: list[int] = field(default_factory=lambda: list(WORDS))
    step_s: float = 0.0  # pause between steps; 0 is full speed
    first_s: float = 0.0  # before the first token
    step_tokens: int = 1  # tokens per sequence and step
    cached_tokens: int = 0
    announce: bool = False  # a start is told at once, before the first token
    reject: RejectReason | None = None
    reject_s: float = 0.0  # and so long after it was submitted
    die_at: int | None = None  # every connection is cut once a sequence has this many tokens
    stop_at: int | None = None  # the sequence ends here with its first stop id
    fail_at: int | None = None  # the sequence ends here with an error
    script: list[int] | None = None  # these tokens, then a stop
    numbers: Callable[[list[int]], list[float]] = lambda ids: spread(ids)  # what a prompt with pooling becomes


@dataclass
class Running:
    """One sequence."""

    id: int
    submit: frames.Submit
    seed: int
    due: float
    emitted: int = 0
    waiting: bool = True


class StubConnection(asyncio.Protocol):
    """One gateway's connection: its sequences go on step by step as long as it is there."""

    def __init__(self, replica: "StubReplica") -> None:
        self._replica = replica
        self._reader = frames.FrameReader()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._running: dict[int, Running] = {}
        self._timer: asyncio.Handle | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class derives from none of asyncio's
        self._transport.set_write_buffer_limits(high=256 << 10)
        self._replica.connections.add(self)
        self.send(self._replica.hello())

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._running.clear()
        self._replica.connections.discard(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._step_soon()

    def data_received(self, received: bytes) -> None:
        for frame in self._reader.feed(received):
            if isinstance(frame, frames.Submit):
                self._submit(frame)
            elif isinstance(frame, RaiseEpochs):
                self._replica.epochs |= dict(zip(frame.ids, frame.epochs, strict=True))
            elif isinstance(frame, RouteKey):
                self._replica.route_key = frame.key
            elif isinstance(frame, frames.PollLoad):
                self._replica.polls += 1
                self.send(frames.ReplicaLoad(self.running, 0, 0, 100, 0, 0))
            elif isinstance(frame, frames.Cancel):
                self._replica.cancels.extend(frame.ids)
                for id in frame.ids:
                    self._running.pop(id, None)

    def send(self, frame: frames.Frame) -> None:
        if self._transport is not None:
            self._transport.write(frames.encode_frame(frame))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def wake(self) -> None:
        """What waited while the replica was not on the device goes on."""
        self._step_soon()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> list[Running]:
        return list(self._running.values())

    def _submit(self, submit: frames.Submit) -> None:
        behaviour = self._replica.behaviour
        self._replica.submits.append(submit)
        if behaviour.reject is not None:
            reject = frames.Reject(submit.id, behaviour.reject, "as told", 1500)
            self._loop.call_later(behaviour.reject_s, self.send, reject) if behaviour.reject_s else self.send(reject)
            return
        seed = sum(array("I", submit.tokens))
        due = self._loop.time() + behaviour.first_s
        choices = submit.given or [frames.GivenTokens(choice, b"") for choice in range(submit.n)]
        for index, given in enumerate(choices):
            running = Running(submit.id + index, submit, seed + given.choice, due, waiting=not behaviour.announce)
            running.emitted = len(given.tokens) // 4
            self._running[running.id] = running
            if behaviour.announce:
                self.send(
                    frames.StepOutputs([], [], b"", [frames.SequenceStarted(running.id, behaviour.cached_tokens, 0.0)])
                )
        self._step_soon()

    def _step_soon(self, after_s: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._paused and self._running and self._replica.state.residency is Residency.DEVICE:
            loop = self._loop
            self._timer = loop.call_later(after_s, self._step) if after_s else loop.call_soon(self._step)

    def _step(self) -> None:
        """One step for every sequence whose time has come, as one Progress."""
        self._timer = None
        if self._replica.state.residency is not Residency.DEVICE:
            return
        behaviour, now = self._replica.behaviour, self._loop.time()
        ids: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        started: list[frames.SequenceStarted] = []
        finished: list[frames.SequenceFinished] = []
        logprobs: list[frames.TokenLogprobs] = []
        vectors: list[frames.PoolingOutput] = []
        for running in list(self._running.values()):
            if running.due > now + 0.0005:
                continue
            if behaviour.die_at is not None and running.emitted >= behaviour.die_at:
                self._replica.die()
                return
            if running.waiting:
                running.waiting = False
                started.append(frames.SequenceStarted(running.id, behaviour.cached_tokens, 0.0))
            if running.submit.pooling is not None and behaviour.fail_at is None:
                numbers = behaviour.numbers(array("I", running.submit.tokens).tolist())
                vectors.append(frames.PoolingOutput(running.id, array("f", numbers).tobytes()))
                finished.append(frames.SequenceFinished(running.id, FinishReason.STOP, 0))
                del self._running[running.id]
                continue
            new, finish = self._next(running, behaviour)
            running.due = ((now + 0.001) // behaviour.step_s + 1) * behaviour.step_s if behaviour.step_s else now
            ids.append(running.id)
            counts.append(len(new))
            tokens += new
            if running.submit.sampling.logprobs is not None:
                logprobs += [_scored(running, token) for token in new]
            if finish is not None:
                finished.append(finish)
                del self._running[running.id]
        if ids or finished:
            self.send(
                frames.StepOutputs(ids, counts, array("I", tokens).tobytes(), started, finished, logprobs, vectors)
            )
        if self._running:
            self._step_soon(max(0.0, min(running.due for running in self._running.values()) - self._loop.time()))

    def _next(self, running: Running, behaviour: Behaviour) -> tuple[list[int], frames.SequenceFinished | None]:
        submit = running.submit
        count = min(behaviour.step_tokens, submit.max_tokens - running.emitted)
        if behaviour.script is not None:
            new = behaviour.script[running.emitted : running.emitted + count]
        else:
            words, at = behaviour.words, running.seed + running.emitted
            new = [words[(at + i) % len(words)] for i in range(count)]
        running.emitted += len(new)
        done = running.emitted
        if behaviour.fail_at is not None and done >= behaviour.fail_at:
            return new, frames.SequenceFinished(running.id, FinishReason.ERROR, done, "the stub was told to fail")
        ended = behaviour.stop_at is not None and done >= behaviour.stop_at
        if behaviour.script is not None and done >= len(behaviour.script):
            ended = True
        if ended and done < submit.max_tokens:
            new = [*new, submit.stop_ids[0]]
            return new, frames.SequenceFinished(running.id, FinishReason.STOP, done + 1)
        if done >= submit.max_tokens:
            return new, frames.SequenceFinished(running.id, FinishReason.LENGTH, done)
        return new, None


def _scored(running: Running, token: int) -> frames.TokenLogprobs:
    alternatives = running.submit.sampling.logprobs or 0
    top = [token, *(token + 1 + i for i in range(alternatives - 1))] if alternatives else []
    return frames.TokenLogprobs(running.id, -0.25, top, [-0.25 - i for i in range(len(top))])


def spread(ids: list[int], width: int = 384) -> list[float]:
    """A vector that tells a prompt from every other: its length, then its ids again and again."""
    return [float(len(ids)), *(float(ids[i % len(ids)]) for i in range(width - 1))]


class StubReplica:
    """One replica on a socket; `connections`, `submits` and `cancels` tell what happened. `state` is what its machine
    says of it."""

    def __init__(self, path: Path, behaviour: Behaviour, model: str = MODEL) -> None:
        self.path = path
        self.behaviour = behaviour
        self.model = model
        self.connections: set[StubConnection] = set()
        self.submits: deque[frames.Submit] = deque(maxlen=100_000)
        self.cancels: deque[int] = deque(maxlen=100_000)
        self.epochs: dict[bytes, int] = {}
        self.route_key = b""
        self.polls = 0
        self.deaths = 0
        self.revision, self.digest = "stub", ""
        device = Residency.DEVICE
        self.state = frames.ReplicaState(model, f"unix:{path}", device, 1, toward=device)

    @property
    def running(self) -> int:
        return sum(connection.running for connection in self.connections)

    @property
    def emitted(self) -> int:
        """Tokens so far of the sequences that run."""
        return sum(one.emitted for connection in self.connections for one in connection.sequences)

    def hello(self) -> frames.Hello:
        behaviour = self.behaviour
        return frames.Hello(
            protocol=frames.PROTOCOL_OLDEST,
            model=self.model,
            revision=self.revision,
            boot="1",
            pid=0,
            context_tokens=behaviour.context_tokens,
            vocabulary=behaviour.vocabulary,
            block_tokens=16,
            blocks=1024,
            newest_protocol=behaviour.newest_protocol,
            digest=self.digest,
            raises_epochs=behaviour.raises_epochs,
            names_prefixes=behaviour.names_prefixes,
            image_tokens=behaviour.image_tokens,
            region=behaviour.region,
            polled=behaviour.polled,
        )

    def publish(self, held: HeldPrefixes) -> None:
        """Tells every gateway where prefixes are."""
        for connection in list(self.connections):
            connection.send(held)

    def load(
        self,
        *,
        waiting: int = 0,
        draining: bool = False,
        shared_blocks: int = 0,
        counters: dict[str, int] | None = None,
        blocks: int = 0,
        ranks: Sequence[frames.RankLoad] = (),
        tiers: tuple[frames.TierLoad | None, frames.TierLoad | None] = (None, None),
    ) -> None:
        """Tells every gateway how full it is; `tiers` are those of host memory and of disk."""
        for connection in list(self.connections):
            running = connection.running
            load = frames.ReplicaLoad(
                *(running, waiting, 0, 100, 0, 0, draining, counters or {}, shared_blocks),
                **{"blocks": blocks, "ranks": [*ranks], "host_tier": tiers[0], "disk_tier": tiers[1]},
            )
            connection.send(load)

    def hurry(self) -> None:
        """What runs goes on now, whatever it was to wait for."""
        for connection in self.connections:
            for running in connection.sequences:
                running.due = 0.0
            connection.wake()

    def die(self) -> None:
        """Every connection ends, as when the process is killed."""
        self.deaths += 1
        for connection in list(self.connections):
            connection.close()

    async def serve(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(lambda: StubConnection(self), str(self.path))


class StubMachine(asyncio.Protocol):
    """Tells every gateway of the same replicas, and keeps what they ask for."""

    def __init__(self, fleet: "StubFleet") -> None:
        self._fleet = fleet
        self._frames = frames.FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class derives from none of asyncio's
        self._fleet.machines.add(self)
        self.tell()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fleet.machines.discard(self)

    def data_received(self, received: bytes) -> None:
        for frame in self._frames.feed(received):
            assert isinstance(frame, frames.ModelDemand), frame
            self._fleet.wakes.append(frame)
            self._fleet.woken(frame)

    def tell(self) -> None:
        if self._transport is not None:
            self._transport.write(frames.encode_frame(self._fleet.said()))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class StubFleet:
    """A machine with its replicas, all in this process, whose `behaviour` they share. `wakes` are what gateways asked
    for, and `woken` is called with each; it moves nothing by itself."""

    def __init__(self, folder: Path, replicas: int = 1, model: str = MODEL) -> None:
        self.behaviour = Behaviour()
        self.address = f"unix:{folder / 'machine.sock'}"
        self.replicas = [StubReplica(folder / f"replica-{i}.sock", self.behaviour, model) for i in range(replicas)]
        self.hidden: set[int] = set()  # replicas that the machine does not tell of
        self.machines: set[StubMachine] = set()
        self.wakes: list[frames.ModelDemand] = []
        self.woken: Callable[[frames.ModelDemand], None] = lambda wake: None
        self.moves = {"wake": 3, "sleep": 2, "wake_failed": 1}
        self.protocol = frames.PROTOCOL_OLDEST  # that the machine speaks: it tells what has changed, and does not beat
        self.draining = False

    def said(self) -> frames.MachineState:
        states = [replica.state for i, replica in enumerate(self.replicas) if i not in self.hidden]
        devices, moves = [frames.DeviceState("cpu", 800, 600, 500)], self.moves
        return frames.MachineState(
            "stub", states, devices, 70, 90, moves, protocol=self.protocol, draining=self.draining,
            region=self.behaviour.region,
        )  # fmt: skip

    def tell(self) -> None:
        """The machine says again what it has."""
        for machine in list(self.machines):
            machine.tell()

    def move(
        self,
        index: int,
        residency: Residency,
        toward: Residency | None = None,
        ready_ms: int = 0,
        **told: Any,
    ) -> None:
        """The replica is there now, and goes there; `told` are further fields of its state."""
        replica = self.replicas[index]
        told |= {"residency": residency, "toward": residency if toward is None else toward, "ready_ms": ready_ms}
        replica.state = msgspec.structs.replace(replica.state, **told)
        for connection in list(replica.connections):
            connection.wake()
        self.tell()

    @property
    def running(self) -> int:
        return sum(replica.running for replica in self.replicas)

    @property
    def submits(self) -> list[frames.Submit]:
        return [submit for replica in self.replicas for submit in replica.submits]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["StubFleet"]:
        loop = asyncio.get_running_loop()
        path = self.address.removeprefix("unix:")
        servers = [await replica.serve() for replica in self.replicas]
        servers.append(await loop.create_unix_server(lambda: StubMachine(self), path))
        try:
            yield self
        finally:
            for server in servers:
                server.close()
            for machine in list(self.machines):
                machine.close()
            for replica in self.replicas:
                for connection in list(replica.connections):
                    connection.close()


async def main(folder: Path, options: dict[str, object]) -> None:
    """Serves until killed; says `ready` once it does."""
    fleet = StubFleet(folder, int(str(options.get("replicas", 1))), str(options.get("model", MODEL)))
    for name in ("step_s", "first_s", "step_tokens", "words", "vocabulary", "context_tokens"):
        if name in options:
            setattr(fleet.behaviour, name, options[name])
    async with fleet.serving():
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    with contextlib.suppress(KeyboardInterrupt):
        import uvloop

        uvloop.run(main(Path(asked["folder"]), asked))
