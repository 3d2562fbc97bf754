"""Pages of lists: which part was asked for, and what is said of it. It does not know of what the lists are."""

from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

PAGE_MAX: Final = 1_000_000


def sliced(found: Sequence[T], page: int, per_page: int) -> tuple[Sequence[T], dict[str, int]]:
    """The page, empty past the end, and its `result_info`."""
    shown = found[(page - 1) * per_page : page * per_page]
    return shown, {"count": len(shown), "page": page, "per_page": per_page, "total_count": len(found)}
