"""What may stand somewhere, in words."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from gateway.field_hints import allowed_ranges, allowed_words


class Inner(msgspec.Struct):
    role: Literal["user", "system"]
    share: Annotated[float, Meta(gt=0, lt=0.5)] = 0.1


class Body(msgspec.Struct):
    heat: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    least: Annotated[int, Meta(ge=1)] = 1
    stop: Annotated[str, Meta(min_length=1, max_length=64)] | Annotated[list[str], Meta(max_length=4)] = ""
    name: Annotated[str, Meta(min_length=1)] = ""
    free: str | dict[str, Any] | int = ""
    inner: Annotated[list[Inner], Meta(min_length=1, max_length=9)] = []
    described: Annotated[Annotated[int, Meta(ge=1, le=2)] | None, Meta(description="said twice over")] = None
    mode: Literal["", "fast"] = ""
    biases: Annotated[dict[str, Annotated[float, Meta(ge=-1, le=1)]], Meta(max_length=3)] = {}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("heat", "a number from 0 to 2"),
        ("seed", "a whole number from -9223372036854775808 to 9223372036854775807"),
        ("least", "a whole number from 1"),
        ("stop", "a text of 1 to 64 characters or a list of at most 4"),
        ("name", "a text that is not empty"),
        ("free", ""),
        ("inner", "a list of 1 to 9"),
        ("inner[0].share", "a number above 0 below 0.5"),
        ("described", "a whole number from 1 to 2"),
        ("biases", "an object of at most 3 entries"),
        ("biases[...]", "a number from -1 to 1"),
        ("nowhere.at[1].all", ""),
    ],
)
def test_ranges_are_said_whole(place: str, said: str) -> None:
    assert allowed_ranges(Body, place) == said


def test_words_are_found_at_their_place() -> None:
    assert allowed_words(Body, "inner[3].role") == ["system", "user"]
    assert allowed_words(Body, "mode") == ["fast"], "and an empty one is none to send"
    assert allowed_words(Body, "heat") == []
