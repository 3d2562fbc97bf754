"""Pages of lists: which part was asked for, and what is said of it. It does not know of what the lists are."""

from collections.abc import Sequence
from typing import Final, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")

PAGE_MAX: Final = 1_000_000


class PageItem(msgspec.Struct, frozen=True):
    """Which part of a list this is; past its end a page is empty."""

    count: int
    page: int
    per_page: int
    total_count: int


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """A page in the envelope."""

    result: Sequence[T]
    result_info: PageItem
    success: Literal[True] = True
    errors: tuple[()] = ()
    messages: tuple[()] = ()


def sliced(found: Sequence[T], page: int, per_page: int) -> tuple[Sequence[T], PageItem]:
    """The page, empty past the end, and what is said of it."""
    shown = found[(page - 1) * per_page : page * per_page]
    return shown, PageItem(len(shown), page, per_page, len(found))
