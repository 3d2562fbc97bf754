"""The encoder of a model's images on a GPU, whose parameters lie among the model's weights and come and go with these.

It knows no prompts and no queue.
"""

import threading
from collections.abc import Sequence as Items
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.memory.streams import DeviceStream, StreamEvent
from engine.models.decoder_config import VisionConfig
from engine.step.executor import EncoderAsleep
from engine.vision.encoders import VisionEncoder

_PATCHES_MAX: Final = 4096  # of images that are encoded together
_NUMBERS: Final = 20  # of the encoder's hidden size that each patch takes meanwhile


class GpuImageEncoder:
    """A DeviceImageEncoder: an image's last bits depend on how many are encoded with it."""

    def __init__(self, config: VisionConfig, encoder: VisionEncoder, rows_EH: Tensor, stream: DeviceStream) -> None:
        """`rows_EH` is the buffer of embeddings that steps read, which are queued in `stream`."""
        self.side, self.tokens, self.token = config.side, config.tokens, config.image_token
        self.together = max(1, _PATCHES_MAX // config.grid**2)
        self.encoding_bytes = self.together * config.grid**2 * config.hidden * _NUMBERS * rows_EH.element_size()
        self._encoder = encoder
        self._rows_EH = rows_EH
        self._placed = 0
        self._steps = stream
        self._own = DeviceStream(stream.device)
        self._lock = threading.Lock()  # it does not fall asleep while it encodes
        self._awake = True

    def encode(self, images: Items[bytes]) -> list[NDArray[np.float32]]:
        with self._lock:
            if not self._awake:
                raise EncoderAsleep
            pixels = np.frombuffer(b"".join(images), np.uint8).reshape(len(images), self.side, self.side, 3)
            with self._own.entered():
                rows_BTH = self._encoder.embeddings(torch.from_numpy(pixels.copy()).to(self._own.device)).float()
                host_BTH = torch.empty(
                    rows_BTH.shape, pin_memory=self._own.queues
                )  # else the copy takes ten times as long
                host_BTH.copy_(rows_BTH, non_blocking=True)
            self._own.wait()
            return list(host_BTH.numpy())

    def place(self, rows_NH: NDArray[np.float32], row: int) -> None:
        """Queues the copy ahead of the next step, from memory that torch keeps until it is done."""
        host_NH = torch.from_numpy(rows_NH).to(self._rows_EH.dtype)
        if self._steps.queues:
            host_NH = host_NH.pin_memory()
        with self._steps.entered():
            self._rows_EH[row : row + len(rows_NH)].copy_(host_NH, non_blocking=True)
        self._placed = max(self._placed, row + len(rows_NH))

    def clear(self) -> None:
        if self._placed:
            with self._steps.entered():
                self._rows_EH[: self._placed].zero_()
            self._placed = 0

    def sleep(self) -> None:
        with self._lock:
            self._awake = False

    def wake(self, arrived: StreamEvent) -> None:
        with self._lock:
            self._own.follow(arrived)
            self._awake = True
