"""Chats that come at random, answered by two replicas that do both, and by one that computes prompts and one that
answers: how long streams wait between two tokens, and how many come. It does a gateway's part by itself, over the
replicas' own sockets, with the same requests at the same moments for both."""

import random
import secrets
import selectors
import statistics
import time
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.engine.moving.pairs import two_replicas, wait_until_idle
from benchmarks.record import record
from engine.protocol.cache_frames import HandOver
from engine.protocol.frames import Submit
from engine.protocol.types import GivenTokens, SamplingParams, Scope
from tests.support.moving_replicas import MovingReplica, order_of

SETTLE_S = 5.0  # of each run, which is not counted


@dataclass(frozen=True, slots=True)
class Load:
    """Requests a second, for so long, of so many tokens in and out on average."""

    per_s: float
    seconds: float
    tokens_in: int
    tokens_out: int


LOADS = {"cuda": Load(10.0, 25.0, 2048, 200), "cpu": Load(2.0, 12.0, 192, 48)}


@dataclass(slots=True, eq=False)
class Stream:
    """A request, where it is answered now, and when its tokens came."""

    order: Submit
    at: MovingReplica
    id: int = 0
    key: bytes = b""
    seen: int = 0  # of the tokens from where it is now
    tokens: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    begun_s: float = 0.0


class Run:
    """One run of a load. `apart`: the first replica computes prompts, the second one answers."""

    def __init__(self, pair: tuple[MovingReplica, MovingReplica], load: Load, apart: bool, seed: int) -> None:
        self._pair = pair
        self._apart = apart
        rng, at_s = random.Random(seed), 0.0
        self._arrivals: list[tuple[float, Submit]] = []
        while at_s < load.seconds:
            count_in, count_out = (
                rng.randint(count // 2, 3 * count // 2) for count in (load.tokens_in, load.tokens_out)
            )
            prompt = [rng.randrange(5, 900) for _ in range(count_in)]
            self._arrivals.append((at_s, order_of(prompt, count_out, Scope(), SamplingParams(ignore_eos=True))))
            at_s += rng.expovariate(load.per_s)
        self._load = load
        self._active: list[Stream] = []
        self.done: list[Stream] = []
        self.moved = 0

    def run(self) -> None:
        """Sends all requests in their time, and waits for their ends."""
        began_s, arrivals = time.monotonic(), self._arrivals[::-1]
        with selectors.DefaultSelector() as selector:
            for replica in self._pair:
                selector.register(replica.peer.socket, selectors.EVENT_READ, replica)
            while arrivals or self._active:
                now = time.monotonic() - began_s
                assert now < 4 * self._load.seconds, f"{len(self._active)} streams do not end"
                while arrivals and arrivals[-1][0] <= now:
                    self._begin(arrivals.pop()[1])
                wait_s = min(0.5, max(0.0, arrivals[-1][0] - now)) if arrivals else 0.5
                for key, _ in selector.select(wait_s):
                    key.data.peer.read(0.001)
                    self._hear(key.data)
        self.began_s = began_s

    def _begin(self, order: Submit) -> None:
        first, second = self._pair
        busy = [sum(stream.at is replica for stream in self._active) for replica in self._pair]
        stream = Stream(order, first if self._apart or busy[0] <= busy[1] else second, begun_s=time.monotonic())
        stream.id = stream.at.peer.submit(order)
        if self._apart:
            stream.key = secrets.token_bytes(32)
            stream.at.peer.send(HandOver(stream.id, second.takes_at, "7", stream.key))
        self._active.append(stream)

    def _hear(self, replica: MovingReplica) -> None:
        now, peer = time.monotonic(), replica.peer
        for stream in [stream for stream in self._active if stream.at is replica]:
            came = peer.tokens[stream.id][stream.seen :]
            stream.seen += len(came)
            stream.tokens += came
            stream.token_s += [now] * len(came)
            assert stream.id not in peer.rejected, peer.rejected[stream.id].message
            finished = peer.finished.get(stream.id)
            if finished is None:
                continue
            del peer.tokens[stream.id]
            if finished.reason == "moved":
                self._follow(stream)
            else:
                self._active.remove(stream)
                self.done.append(stream)

    def _follow(self, stream: Stream) -> None:
        given = [GivenTokens(0, array("I", stream.tokens).tobytes(), stream.key)]
        stream.at, stream.seen = self._pair[1], 0
        stream.id = stream.at.peer.submit(msgspec.structs.replace(stream.order, given=given))
        self.moved += 1

    @property
    def gaps_ms(self) -> list[float]:
        """Between two tokens of a stream, of all of them."""
        from_s = self.began_s + SETTLE_S
        pairs = [pair for each in self.done for pair in zip(each.token_s, each.token_s[1:], strict=False)]
        return sorted(1e3 * (later - earlier) for earlier, later in pairs if earlier >= from_s)

    @property
    def tokens_s(self) -> float:
        """Tokens a second, from when it had settled until the last request came."""
        from_s, to_s = self.began_s + SETTLE_S, self.began_s + self._load.seconds
        return sum(from_s <= at_s < to_s for each in self.done for at_s in each.token_s) / (to_s - from_s)

    @property
    def first_ms(self) -> float:
        return statistics.median(1e3 * (each.token_s[0] - each.begun_s) for each in self.done)


def apart(device: str, kept: Path | None) -> None:
    load = LOADS[device]
    with two_replicas(device, kept) as pair:
        for warming in (False, True):  # a few of each, so that what is compiled or captured late is there
            Run(pair, replace(load, seconds=2.0), warming, seed=1).run()
        mixed, split = Run(pair, load, False, seed=2), Run(pair, load, True, seed=2)
        for run in (mixed, split):
            run.run()
            wait_until_idle(*pair)
    report(device, load, mixed, split)


def report(device: str, load: Load, mixed: Run, split: Run) -> None:
    model = "llama-3.1-8b bf16, two GPUs" if device == "cuda" else "built-in model, two CPU replicas"
    small = "" if device == "cuda" else ", small"
    shape = (
        f"{load.per_s:g} chats/s for {load.seconds:g} s, {load.tokens_in} in and {load.tokens_out} out on average, "
        f"{model}, 1 prefill and 1 decode against 2 mixed"
    )
    p99s = [run.gaps_ms[int(0.99 * len(run.gaps_ms))] for run in (split, mixed)]
    medians = [statistics.median(run.gaps_ms) for run in (split, mixed)]
    record(
        "handovers", f"kv-pd-p99{small}, between tokens, {shape}", p99s[0] / p99s[1], "ratio", bound=0.5,
        peer=f"{p99s[0]:.1f} against {p99s[1]:.1f} ms; medians {medians[0]:.1f} and {medians[1]:.1f}",
    )  # fmt: skip
    record(
        "handovers", f"kv-pd-output{small}, {shape}", split.tokens_s / mixed.tokens_s, "ratio", bound=0.95,
        peer=f"{split.tokens_s:.0f} against {mixed.tokens_s:.0f} tokens/s",
    )  # fmt: skip
    record("handovers", f"first token{small}, {shape}", split.first_ms, "ms", peer=f"mixed {mixed.first_ms:.1f}")
    moved = f"of {len(split.done)} prompts"
    record("handovers", f"prompts that moved{small}, {shape}", split.moved / len(split.done), moved, bound=1.0)
