"""What a caller asks of a model that gives vectors, in one shape for all dialects, and what a dialect makes of it.

It knows no JSON paths, accounts or replicas.
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
    """The role of a text: a model may want other words before a query than before a document."""

    TEXT = enum.auto()
    QUERY = enum.auto()
    DOCUMENT = enum.auto()


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """One text, or its token ids, control tokens included. `place` is its field in the body."""

    place: str
    content: str | list[int]
    kind: InputKind = InputKind.TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInputs:
    """One request that cannot be wrong, short of what only the model knows.

    Each item becomes a vector. With `scored` the first item is a query, and each other item becomes a score: how well
    it answers the query; `best` limits the answer to the highest scores. Texts that are too long are cut if `truncate`
    is set, and refused otherwise; None: the dialect has no field for it. Vectors are cut to `dimensions`.
    """

    items: Sequence[EmbeddingInput]
    scored: bool = False
    best: int | None = None
    pooling: Pooling | None = None
    instruction: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    user: str | None = None
    options: RunOptionsBody | None = None


@dataclass(frozen=True, slots=True)
class RankScore:
    """The score of the item with this index, the query left out: 0 … 1 from models that score, else a cosine."""

    index: int
    value: float


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The answer: scores in the order of the dialect, or vectors, each in JSON, and their shape."""

    model: str  # as the caller named it
    request_id: str
    shape: tuple[int, int]
    rows: list[msgspec.Raw]
    scores: Sequence[RankScore]
    pooling: Pooling
    usage: Usage


def json_floats(row_H: Floats) -> bytes:
    """A JSON list of numbers, which read as exactly these float32."""
    return msgspec.json.encode(row_H.tolist())


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A body that asks a model for vectors. `render` writes the body of the answer, `row` one vector in it."""

    model: str
    texts: EmbeddingInputs
    render: Callable[[EmbeddingResult], bytes]
    row: Callable[[Floats], bytes] = json_floats
