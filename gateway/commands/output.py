"""What the commands have in common: help that teaches, the settings, tables for people and JSON for scripts."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, Final

from gateway.config import Config, load_config

NONE: Final = "none"  # takes a setting back, where it may be unset
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_FIRST_DAY: Final = date(1970, 1, 1)


def add_command(commands: Any, name: str, summary: str, teaching: str) -> argparse.ArgumentParser:
    """A command whose --help shows `summary`, its options, and then `teaching` as it is written."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, epilog=teaching, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="settings (default: hearth.toml where it exists)")
    parser.add_argument("--state", metavar="FOLDER", help="state folder (default: .hearth)")
    return parser


def add_action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """One action of a command, which takes the command's own options as well, and --json."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--state", metavar="FOLDER", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def read_settings(options: argparse.Namespace) -> Config:
    """The settings with this command line's options over them. Raises ConfigError."""
    said = vars(options)
    return load_config(
        options.config,
        state_folder=options.state,
        host=said.get("host"),
        port=said.get("port"),
        device=said.get("device"),
    )


def fail(message: str) -> int:
    """Says on stderr what could not be done; the exit status for it."""
    print(f"hearth: {message}", file=sys.stderr)
    return 1


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def duration(text: str) -> float:
    """`30d` → seconds, for argparse."""
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write a number and s, m, h, d or w, like 30d")
    return int(match[1]) * float(_UNITS[match[2]])


def day(text: str) -> int:
    """`2026-01-31` → days since 1970, for argparse."""
    try:
        return (date.fromisoformat(text) - _FIRST_DAY).days
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day: write it like 2026-01-31, in UTC") from None


def day_text(day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")


def time_text(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def split(text: str) -> tuple[str, ...]:
    """`a, b` → its parts; `none` and an empty text have none."""
    return () if text == NONE else tuple(part.strip() for part in text.split(",") if part.strip())


def format_bytes(count: float) -> str:
    """1536 → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("GiB is the last unit")
