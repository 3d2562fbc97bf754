"""Writes the masks of a step's rows, in several threads and beside the caller. It knows no grammars and no tensors.

M masked rows, W words of a bit mask.
"""

import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import llguidance
import numpy as np

from engine.sequences.sequence import GrammarMatcher
from engine.step.layout import Int32s
from engine.structured_output.lark_grammar import LarkMatcher

_FILLERS_MAX: Final = 8  # threads that write the masks of one step
_SLOW_MASKS_S: Final = 0.004  # after masks of a step that took longer those of the next step are timed one by one
_BESIDE_MIN: Final = 8  # fewer masks take the caller mostly less time than another thread takes to begin


class MaskWriter:
    """Threads that write masks, of one step at a time."""

    def __init__(self, threads: int | None) -> None:
        """None: one for each core."""
        self._fillers = min(threads or os.cpu_count() or 1, _FILLERS_MAX)
        self._executor = llguidance.LLExecutor(self._fillers)
        self._timers = ThreadPoolExecutor(self._fillers)  # its threads start where masks are slow
        self._beside = ThreadPoolExecutor(1)
        self._timing = False  # the masks of the next step are timed one by one

    def begin(self, matchers: Items[GrammarMatcher | None], words: int) -> Callable[[], Int32s]:
        """Begins to write masks while the caller does something else, but accepts no token. Returns what waits for
        them, as `write` returns them."""
        if len(matchers) < _BESIDE_MIN and not self._timing:
            masks_MW = self.write(matchers, words)
            return lambda: masks_MW
        begun = threading.Event()

        def write() -> Int32s:
            try:
                return self.write(matchers, words, begun.set)
            finally:
                begun.set()

        masks = self._beside.submit(write)
        begun.wait()  # the interpreter's lock is free from here on: without that the thread would wait for it
        return masks.result

    def write(
        self, matchers: Items[GrammarMatcher | None], words: int, begun: Callable[[], None] = lambda: None
    ) -> Int32s:
        """[M, W]: bit (id % 32) of word (id ÷ 32) says whether a token may be next; all may where there is no matcher.

        Some 40 µs per row at 128,256 tokens, rows of several parsers at a time. Each matcher then has its `mask_us`.
        `begun` is called before the longest part, in which other threads run.
        """
        masks_MW = np.empty((len(matchers), words), np.int32)
        rows = []
        for row, matcher in enumerate(matchers):
            if matcher is None:
                masks_MW[row] = -1
            else:
                assert isinstance(matcher, LarkMatcher)
                rows.append((matcher, row))
        if rows:
            took_s = (self._write_timed if self._timing else self._write_at_once)(rows, masks_MW, begun)
            self._timing = took_s > _SLOW_MASKS_S
        for matcher, row in rows:
            matcher.fix_mask(masks_MW[row])
        return masks_MW

    def close(self) -> None:
        self._beside.shutdown()
        self._timers.shutdown()

    def _write_at_once(self, rows: list[tuple[LarkMatcher, int]], masks_MW: Int32s, begun: Callable[[], None]) -> float:
        """Writes the masks of these rows at once. Returns how long that took, in s."""
        inner = [(matcher.inner, row) for matcher, row in rows]
        size = masks_MW.itemsize * masks_MW.shape[1]
        begun()
        began = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(inner, masks_MW.ctypes.data, size, len(masks_MW))
        took_s = time.perf_counter() - began
        each_us = 1e6 * took_s / len(rows)
        for matcher, _ in rows:
            matcher.share_mask_time(each_us)
        return took_s

    def _write_timed(self, rows: list[tuple[LarkMatcher, int]], masks_MW: Int32s, begun: Callable[[], None]) -> float:
        """Writes the masks of these rows in several threads, each timed by itself; by that it shares out what they
        took together. Returns what a thread took of its own time, in s."""
        address, size = masks_MW.ctypes.data, masks_MW.itemsize * masks_MW.shape[1]
        threads = min(self._fillers, len(rows))

        took_us = [0.0] * len(rows)

        def write(first: int) -> None:
            for index in range(first, len(rows), threads):
                matcher, row = rows[index]
                took_us[index] = matcher.write_mask(address + row * size, size)

        began = time.perf_counter()
        if threads == 1:
            begun()
            write(0)
        else:
            parts = self._timers.map(write, range(threads))
            begun()
            list(parts)
        took_s = time.perf_counter() - began
        processor_s = 1e-6 * sum(took_us)
        for (matcher, _), each_us in zip(rows, took_us, strict=True):  # once all is known: the caller may be planning
            matcher.note_mask_time(each_us, each_us * took_s / processor_s)
        return processor_s / threads
