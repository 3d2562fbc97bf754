"""To whom a replica says its load. It knows neither sockets nor what a load says."""

from collections.abc import Iterable


class LoadReports:
    """A connection is told whenever it is its turn; one that polls only where that is news to it: the load is another
    one, it was said while something ran or waited here, or the connection has sent something since."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}  # told last to those that poll; empty: they sent something since
        self._polled: set[int] = set()

    def poll(self, number: int) -> None:
        """A connection asks: it is told, whatever it knows."""
        self._known[number] = b""
        self._polled.add(number)

    def hear(self, number: int) -> None:
        """A connection sent something, by which it may take the load for another one than it is."""
        if number in self._known:
            self._known[number] = b""

    def take_polled(self) -> set[int]:
        """The connections that asked since the last call."""
        polled, self._polled = self._polled, set()
        return polled

    def choose(self, turn: Iterable[int], load: bytes, *, idle: bool) -> list[int]:
        """The connections that are told this load, of those whose turn it is. `idle`: nothing runs or waits here."""
        told = [number for number in turn if self._known.get(number) != load]
        for number in self._known.keys() & told:
            self._known[number] = load if idle else b""
        return told

    def drop(self, number: int) -> None:
        """A connection has ended."""
        self._known.pop(number, None)
        self._polled.discard(number)
