"""What the commands have in common: help that teaches, the settings, tables for people and JSON for scripts."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from gateway.config import Config, load_config


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


def in_bytes(count: float) -> str:
    """1536 → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("GiB is the last unit")
