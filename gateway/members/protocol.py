"""The machines of a cluster as a gateway is told of them, and who may tell: its settings, the store, or Kubernetes. One
contract test holds all three: tests/gateway/members/test_contract.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Membership:
    """The addresses of all machines there are.

    `removed` are those that an operator took out: their connections end at once. Any other that is gone from
    `machines` may only not be seen for a while, and is kept for as long as it answers.
    """

    machines: frozenset[str]
    removed: frozenset[str] = frozenset()


class Members(Protocol):
    """One source of machines."""

    async def follow(self, on_change: Callable[[Membership], None]) -> None:
        """Tells the membership, and tells it anew whenever it differs, until cancelled. While the source does not
        answer, nothing is told: what was told last stays."""
