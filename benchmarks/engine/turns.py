"""Two engines on one device that take turns, each in a process of its own, and how fast the GPU's cores ran meanwhile.

It knows no shapes: what is asked of an engine is a few steps of many sequences, or one prompt's first token.
"""

import ctypes
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec

_OPENED_S: Final = 240.0
_ANSWERED_S: Final = 120.0
_CLOCK_EVERY_S: Final = 0.02


class Turns:
    """One model's engine, in a process of its own."""

    def __init__(self, model: ModelSpec, device: str, clocks: "Clocks") -> None:
        spawn = multiprocessing.get_context("spawn")
        self._asks, child_pipe = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(child_pipe, model, device), daemon=True)
        self._clocks = clocks
        self._process.start()
        child_pipe.close()
        self.memory: MemoryReport = self._answer(_OPENED_S)

    def ask(self, *request: object) -> Any:
        """Raises RuntimeError where its process ended, TimeoutError where it does not answer."""
        self._asks.send(request)
        return self._answer(_ANSWERED_S)

    def _answer(self, within_s: float) -> Any:
        until = time.monotonic() + within_s
        while not self._asks.poll(_CLOCK_EVERY_S):
            self._clocks.look()
            if time.monotonic() > until:
                raise TimeoutError("an engine does not answer")
        try:
            return self._asks.recv()
        except EOFError:
            raise RuntimeError("an engine's process ended; its own words are above") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._asks.close()
        self._process.join(10)
        self._process.kill()


def _serve(asks: Connection, model: ModelSpec, device: str) -> None:
    """Until the other end is closed. It answers with what its engine's memory is, then each question in turn."""
    from engine.bench.session import BenchEngine, BenchSession
    from engine.execution.open import inference_mode

    inference_mode().__enter__()
    engine = BenchEngine(model, device)
    engine.prepare()
    asks.send(engine.model.report)
    vocabulary = range(engine.vocabulary)
    with engine, ExitStack() as stack:
        while True:
            try:
                what, *sizes = asks.recv()
            except EOFError:
                return
            if what == "begin":  # so many sequences, of prompts and answers so long
                rows, prompt, max_tokens = sizes
                session = stack.enter_context(BenchSession(engine, gap_ms=60_000))
                for index in range(rows):
                    session.submit(random.Random(index).choices(vocabulary, k=prompt), max_tokens)
                session.run_until_all_stream()
                asks.send(None)
            elif what == "steps":
                asks.send(session.steps_ms(*sizes))
            elif what == "end":
                stack.pop_all().close()
                asks.send(None)
            else:
                tokens, seed = sizes
                with BenchSession(engine) as alone:
                    stream = alone.submit(random.Random(seed).choices(vocabulary, k=tokens), 1)
                    alone.run()
                    asks.send(1e3 * (stream.token_s[0] - stream.submitted_s))


class Clocks:
    """How fast the GPU's cores ran while others computed; nothing where there is none."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._library: ctypes.CDLL | None = None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        self._device = ctypes.c_void_p()
        if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)) == 0:
            self._library = library

    def look(self) -> None:
        megahertz = ctypes.c_uint()
        if self._library and self._library.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(megahertz)) == 0:
            self._seen.append(megahertz.value)

    def take(self) -> str:
        """Takes what was seen since the last call."""
        seen, self._seen = self._seen, []
        return f"{min(seen)}-{max(seen)} MHz" if seen else "clocks unknown"


@contextmanager
def two_engines(first: ModelSpec, second: ModelSpec, device: str) -> Iterator[tuple[Turns, Turns, Clocks]]:
    """Both models, loaded."""
    clocks = Clocks()
    with Turns(first, device, clocks) as one, Turns(second, device, clocks) as other:
        clocks.take()
        yield one, other, clocks


def pairs(sides: Sequence[Turns], measure: Callable[[Turns, int], float], rounds: int) -> list[float]:
    """The median of each side, in rounds that begin with one and then with the other; the first one warms both."""
    took: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for at in (0, 1) if number % 2 else (1, 0):
            took[at].append(measure(sides[at], number))
    return [statistics.median(each[1:]) for each in took]


def first_token_ms(tokens: int, side: Turns, seed: int) -> float:
    """The time to the first token of a prompt of so many, drawn by the seed."""
    took_ms: float = side.ask("first", tokens, seed)
    return took_ms
