"""Pages of lists: one part, and which part it is. It does not know what is listed."""

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


def sliced(items: Sequence[T], page: int, per_page: int) -> tuple[Sequence[T], PageItem]:
    """Returns a page, empty past the end, and its description."""
    part = items[(page - 1) * per_page : page * per_page]
    return part, PageItem(len(part), page, per_page, len(items))
