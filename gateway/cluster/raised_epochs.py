"""Epochs that were raised, told to every replica once: to those that are connected, and to others when they are. It
does not know whose they are."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from engine.protocol.cache_frames import RaiseEpochs
from gateway.cluster.client import ReplicaConnection

KEPT_S: Final = 2 * 3600.0  # nothing is found in any tier of a replica for so long without being used
IDS_MAX: Final = 20_000
_FRAME_IDS_MAX: Final = 512


class RaisedEpochs:
    """The newest epoch of each id that was raised of late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epochs: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # with when, the oldest first
        self._connected: set[ReplicaConnection] = set()

    def add(self, epochs: Mapping[bytes, int]) -> None:
        """Tells all replicas of these epochs by opaque ids."""
        now = self._clock()
        for id, epoch in epochs.items():
            self._epochs[id] = max(epoch, self._epochs.get(id, (0, now))[0]), now
            self._epochs.move_to_end(id)
        while self._epochs:
            oldest = next(iter(self._epochs))
            if len(self._epochs) <= IDS_MAX and now - self._epochs[oldest][1] <= KEPT_S:
                break
            del self._epochs[oldest]
        for connection in self._connected:
            _send(connection, epochs)

    def connected(self, connection: ReplicaConnection) -> None:
        """Tells a replica all of them, once, when its hello has come."""
        hello = connection.hello
        if connection in self._connected or hello is None or not hello.raises_epochs:
            return
        self._connected.add(connection)
        connection.closed.add_done_callback(lambda _: self._connected.discard(connection))
        _send(connection, {id: epoch for id, (epoch, _) in self._epochs.items()})


def _send(connection: ReplicaConnection, epochs: Mapping[bytes, int]) -> None:
    ids = list(epochs)
    for first in range(0, len(ids), _FRAME_IDS_MAX):
        chunk = ids[first : first + _FRAME_IDS_MAX]
        connection.send(RaiseEpochs(chunk, [epochs[id] for id in chunk]))
