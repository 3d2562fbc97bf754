"""How commands print: tables and units for people, JSON for scripts, progress on stderr."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tqdm import tqdm

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH: Final = 1 << 14

T = TypeVar("T")


def fail(message: str) -> int:
    """Prints on stderr what could not be done; returns the exit status for it."""
    print(f"hearth: {message}", file=sys.stderr)
    return 1


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_either(as_json: bool, document: Any, print_text: Callable[[], object]) -> None:
    """Prints `document` for scripts, or lets `print_text` print for people."""
    if as_json:
        print_json(document)
    else:
        print_text()


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they need to be; in a terminal that is too narrow, long cells fold, the first column never."""
    from rich.table import Table  # only here: most commands print no table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, head in enumerate(heads):
        table.add_column(Text(head), overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    wide_console(_PIPE_WIDTH).print(table)


def wide_console(width: int) -> "Console":
    """Standard output: as wide as its terminal, or `width` where it is none."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=width, height=25)


def progress(items: Sequence[T], unit: str, description: str | None = None) -> "tqdm[T]":
    """The items, with a bar on stderr where that is a terminal."""
    return tqdm(items, desc=description, unit=f" {unit}", file=sys.stderr, disable=not sys.stderr.isatty())


def progress_bar(**options: Any) -> "tqdm[Any]":
    """A bar on stderr where that is a terminal."""
    return tqdm(file=sys.stderr, disable=not sys.stderr.isatty(), **options)


def day_text(day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")


def time_text(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def format_amount(number: float | None) -> str:
    return "-" if number is None else f"{number:,.15g}"


def format_bytes(count: float) -> str:
    """1536 → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
