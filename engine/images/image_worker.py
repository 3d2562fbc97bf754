"""Encodes the images of prompts in a thread beside a replica's loop, several at once.

It knows no sequences beyond whether anybody still has an image, and no tensors.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.log import log
from engine.scheduling.step_plan import PlacedRows
from engine.sequences.sequence import PromptImage
from engine.step.executor import EncoderAsleep, ImageEncoder


class Encoded(NamedTuple):
    """What became of an image: rows, a failure, or neither, and then it is to be ordered again."""

    image: PromptImage
    rows_NH: NDArray[np.float32] | None = None
    failed: bool = False


class ImageWorker:
    """An ImageQueue. All but the encoding happens in the loop's thread: `bell` is readable when images are done."""

    def __init__(
        self, encoder: ImageEncoder, entered: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        """`entered` is what a thread enters that computes."""
        self.bell, self._bell_writer = socket.socketpair()
        self.bell.setblocking(False)
        self._bell_writer.setblocking(False)
        self._encoder = encoder
        self._entered = entered
        self._ordered: deque[PromptImage] = deque()
        self._done: deque[Encoded] = deque()
        self._failed: set[PromptImage] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="images", daemon=True)
        self._thread.start()

    def order(self, images: Items[PromptImage]) -> None:
        with self._changed:
            self._ordered.extend(images)
            self._changed.notify()

    def take_failed(self) -> set[PromptImage]:
        """As in ImageQueue; and gives those their rows that were encoded. Ones that found the encoder asleep are
        ordered again when their sequences run again."""
        while self._done:
            image, rows_NH, failed = self._done.popleft()
            image.ordered = False
            if image.users and failed:
                self._failed.add(image)
            elif image.users and rows_NH is not None:
                image.rows_NH, image.pixels = rows_NH, b""
        failed_images, self._failed = self._failed, set()
        return failed_images

    def place(self, rows: Items[PlacedRows]) -> None:
        for placed in rows:
            self._encoder.place(placed.rows_NH, placed.row)

    def close(self) -> None:
        """Ends the thread, once what it encodes is done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self.bell.close()
        self._bell_writer.close()

    def _run(self) -> None:
        with self._entered():
            while (images := self._next()) is not None:
                self._done.extend(self._encode(images))
                with contextlib.suppress(BlockingIOError):  # full: the loop is about to look anyway
                    self._bell_writer.send(b"!")

    def _next(self) -> list[PromptImage] | None:
        """The oldest images that are still wanted; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ordered or self._closed)
            if self._closed:
                return None
            images: list[PromptImage] = []
            while self._ordered and len(images) < self._encoder.together:
                if (image := self._ordered.popleft()).users:
                    images.append(image)
            return images

    def _encode(self, images: list[PromptImage]) -> list[Encoded]:
        """Each image with its rows, and whether it failed. Where several fail at once each is tried by itself: nobody's
        image fails another's."""
        pixels = [image.pixels for image in images]
        if not all(pixels):  # the last sequence of one has ended meanwhile
            return [Encoded(image) for image in images]
        try:
            rows = self._encoder.encode(pixels)
            finite = [bool(np.isfinite(rows_NH).all()) for rows_NH in rows]
        except EncoderAsleep:
            return [Encoded(image) for image in images]
        except Exception as error:
            if len(images) > 1:
                return [encoded for image in images for encoded in self._encode([image])]
            log("image_not_encoded", level="error", error=repr(error)[:200])
            return [Encoded(image, failed=True) for image in images]
        return [
            Encoded(image, rows_NH if good else None, failed=not good)
            for image, rows_NH, good in zip(images, rows, finite, strict=True)
        ]
