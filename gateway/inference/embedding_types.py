"""What a caller asks of a model that gives vectors, checked and in one shape whichever dialect it came in; and what a
dialect makes of the answer. It knows no JSON paths, accounts or replicas.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.protocol.types import Pooling
from gateway.inference.reply import Usage
from gateway.inference.run_options import RunOptionsBody

Floats = NDArray[np.float32]


class InputKind(enum.Enum):
    """What a text is to its model, which may want other words before a query than before a document."""

    TEXT = enum.auto()
    QUERY = enum.auto()
    DOCUMENT = enum.auto()


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """One text, or its token ids, control tokens included. `place` is the field of the body that holds it."""

    place: str
    content: str | list[int]
    kind: InputKind = InputKind.TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInputs:
    """One request that cannot be wrong, short of what only the model knows.

    Each item becomes a vector; with `scored` the first one is a query, and each other one becomes a score: how well it
    answers the query. `best` are that many with the highest scores. What is too long is cut where `truncate` says so,
    and refused else. `dimensions` are those that vectors are cut to.
    """

    items: Sequence[EmbeddingInput]
    scored: bool = False
    best: int | None = None
    pooling: Pooling | None = None
    instruction: str | None = None
    truncate: bool = False
    dimensions: int | None = None
    user: str | None = None
    options: RunOptionsBody | None = None

    @property
    def length(self) -> int:
        """Characters, or ids, of all of it."""
        return sum(len(item.content) for item in self.items)


@dataclass(frozen=True, slots=True)
class RankScore:
    """Of the item with this index, the query left out: 0 … 1 from models that score, a cosine from vectors."""

    index: int
    value: float


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """What came of it: scores, in the order in which they were asked for, or vectors, each in JSON, and their shape."""

    model: str  # as the caller named it
    request_id: str
    shape: tuple[int, int]
    rows: list[msgspec.Raw]
    scores: Sequence[RankScore]
    pooling: Pooling
    usage: Usage


def json_floats(row_H: Floats) -> bytes:
    """A list of numbers, which read as exactly these float32."""
    return msgspec.json.encode(row_H.tolist())


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request's body, read: which model is asked what, what writes the answer's body, and what one vector in it."""

    model: str
    texts: EmbeddingInputs
    render: Callable[[EmbeddingResult], bytes]
    row: Callable[[Floats], bytes] = json_floats
