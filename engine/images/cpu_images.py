"""The encoder of a model's images on a CPU: its parameters, which sleep and wake, and the rows that steps read.

It knows no prompts and no queue.
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.decoder_config import VisionConfig
from engine.step.executor import EncoderAsleep
from engine.vision.encoders import VisionEncoder

PATCHES_MAX: Final = 8192  # of images that are encoded together: each takes some 100 KB meanwhile


class CpuImageEncoder:
    """An ImageEncoder on a CPU.

    rows_EH  the buffer of embeddings that tokens of a step may name.
    """

    def __init__(self, config: VisionConfig, load: Callable[[], VisionEncoder], rows: int, hidden: int) -> None:
        """`load` reads the encoder, now and at each wake."""
        self.side, self.tokens, self.token = config.side, config.tokens, config.image_token
        self.together = max(1, PATCHES_MAX // config.grid**2)
        self.rows_EH = torch.zeros(rows, hidden)
        self._placed = 0
        self._load = load
        self._lock = threading.Lock()  # it does not fall asleep while it encodes
        self._encoder: VisionEncoder | None = load()
        self.bytes = self._encoder.bytes

    def encode(self, images: Items[bytes]) -> list[NDArray[np.float32]]:
        with self._lock:
            if self._encoder is None:
                raise EncoderAsleep
            pixels = np.frombuffer(b"".join(images), np.uint8).reshape(len(images), self.side, self.side, 3)
            rows_BTE = self._encoder.embeddings(torch.from_numpy(pixels.copy()))
            return list(rows_BTE.float().numpy())

    def place(self, rows_NH: NDArray[np.float32], row: int) -> None:
        self.rows_EH[row : row + len(rows_NH)] = torch.from_numpy(rows_NH)
        self._placed = max(self._placed, row + len(rows_NH))

    def clear(self) -> None:
        """Zeroes what was placed: a step has read it."""
        self.rows_EH[: self._placed] = 0
        self._placed = 0

    def sleep(self) -> None:
        """Drops the parameters, once what is encoded at this moment is done."""
        with self._lock:
            self._encoder = None

    def wake(self) -> None:
        """Reads the parameters again. Raises CheckpointError."""
        with self._lock:
            self._encoder = self._load()
